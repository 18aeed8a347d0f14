"""The key of a compiled program: gathers, under names, everything that decides its code."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from tvmify.artifact import FORMAT_VERSION
from tvmify.cache import Key
from tvmify.errors import UnsupportedTarget
from tvmify.options import CompileOptions
from tvmify.runtime import autocast_text
from tvmify.signature import Signature, TensorSpec
from tvmify.target import Target


def key(
    fingerprint: str,
    signature: Signature,
    weights: Mapping[str, torch.Tensor],
    target: Target,
    options: CompileOptions,
) -> Key:
    """Return the key of a program for one signature.

    Parameters
    ----------
    fingerprint
        The canonical text of the program.
    signature
        Of the call; values of tensors play no part.
    weights
        The tensors that the program reads from its module, by dotted name. Their shapes, dtypes
        and aliases count, their values do not.
    target
        Resolved for the device of the call.
    options
        Those that can change the code count.
    """
    return Key(
        {
            "program": fingerprint,
            "inputs": signature.key_text(),
            "weights": _weights_text(weights),
            "target": str(target),
            "options": options.key_text(),
            "modes": _modes_text(),
            "tuned for": f"{torch.get_num_threads()} threads" if options.tune else "",
            "tvmify": f"{metadata.version('tvmify')} format {FORMAT_VERSION} {_compiler_digest()}",
            "torch": torch.__version__,
            "tvm": metadata.version("apache-tvm"),
            "tvm-ffi": metadata.version("apache-tvm-ffi"),
        }
    )


def device(signature: Signature, weights: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of a call.

    Raises
    ------
    UnsupportedTarget
        Inputs and weights are on several.
    """
    devices = signature.devices | {weight.device for weight in weights.values()}
    if len(devices) > 1:
        raise UnsupportedTarget(
            f"inputs and weights are on {', '.join(sorted(map(str, devices)))}",
            "Move them to one device.",
        )
    return devices.pop() if devices else torch.get_default_device()


def processor(key: Key) -> str:
    """Return what decides, besides the workload, how long a kernel takes: see `Measurements`."""
    return "\n".join(key.entries[name] for name in ("target", "tuned for", "tvmify", "tvm"))


def _weights_text(weights: Mapping[str, torch.Tensor]) -> str:
    first_name: dict[int, str] = {}
    lines = []
    for name, tensor in sorted(weights.items()):
        same_as = first_name.setdefault(id(tensor), name)
        alias = "" if same_as == name else f" is {same_as}"
        lines.append(f"{name}: {TensorSpec.of(tensor)}{alias}")
    return "\n".join(lines)


def _modes_text() -> str:
    modes = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    lines = [f"{name}: {value}" for name, value in modes.items()]
    return "\n".join(filter(None, [*lines, autocast_text()]))


@functools.cache
def _compiler_digest() -> str:
    # The version alone would serve stale code to whoever edits the compiler.
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for folder in ("capture", "compiler"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
