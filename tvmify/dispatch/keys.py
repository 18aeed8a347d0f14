"""The key of a compiled program: named texts for everything that determines its code."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tvmify.artifact import FORMAT_VERSION, Artifact
from tvmify.cache import ANY_TORCH, Key
from tvmify.dispatch import sources
from tvmify.errors import UnsupportedTarget
from tvmify.options import CompileOptions
from tvmify.runtime import autocast_text, cpu_features
from tvmify.signature import Signature, TensorSpec, check_weight
from tvmify.target import DEVICE_OF_KIND, Target, target_for

#: The entry that only the keys of programs for GPUs have, and its driver version for a program that
#: was built without a GPU, which runs with any driver.
_CUDA, _ANY = "cuda", "any"
_TORCH, _MODES, _TUNED_FOR = "torch", "modes", "tuned for"

#: What shapes an artifact, within the package: what records a call, what compiles it, here or in
#: the compiler process, and what chooses the sizes to tune for.
_ROOTS = ("capture", "compiler", "dispatch.building.process", "dispatch.generality.hints")

#: The fields of /proc/cpuinfo that name a processor model, on x86 and on ARM.
_MODEL = ("vendor_id", "model name", "cpu family", "model", "CPU implementer", "CPU part")


def key(
    fingerprint: str,
    signature: Signature,
    weights: Mapping[str, torch.Tensor],
    target: Target,
    options: CompileOptions,
    unpacked: Sequence[str] = (),
    sizes: str = "",
) -> Key:
    """Return the key of a program for one signature, or for one with symbols.

    Parameters
    ----------
    fingerprint
        The canonical text of the program.
    signature
        The signature of the call; the values of tensors do not matter.
    weights
        The tensors that the program reads from its module, by dotted name. Their shapes, dtypes
        and aliases count, their values do not.
    target
        Resolved for the device of the call.
    options
        Only those that can change the code are part of the key.
    unpacked
        Names of weights that calls write to, so the program may not keep packed copies of them.
    sizes
        The requirements on symbolic sizes, if there are any.
    """
    # A program that was built without a GPU is for all GPUs of its architecture.
    device = target.device
    devices = signature.devices | {weight.device for weight in weights.values()}
    gpu = next((found for found in devices if found.type == "cuda"), None)
    cuda = {_CUDA: _cuda_text(gpu)} if target.kind == "cuda" else {}
    return Key(
        {
            "program": fingerprint,
            "inputs": signature.key_text(device),
            **({"sizes": sizes} if sizes else {}),
            "weights": _weights_text(weights, device),
            "unpacked": "\n".join(unpacked),
            "target": str(target),
            "options": options.key_text(),
            _MODES: modes_text(),
            _TUNED_FOR: _tuned_for(target, gpu) if options.tune else "",
            "tvmify": _tvmify_text(),
            _TORCH: torch.__version__,
            "tvm": metadata.version("apache-tvm"),
            "tvm-ffi": metadata.version("apache-tvm-ffi"),
            **cuda,
        }
    )


def key_without_gpu(key: Key) -> Key | None:
    """Return the key of the same program if a machine without a GPU builds it.

    None if it is such a key already, or a key for the CPU.
    """
    if _CUDA not in key.entries or key.entries[_CUDA] == _cuda_text(None):
        return None
    return Key({**key.entries, _CUDA: _cuda_text(None), _TUNED_FOR: ""})


def key_for_any_torch(key: Key) -> Key:
    """Return the key of a program that does not call PyTorch, which any version can use.

    Programs for GPUs were tuned against the libraries of one PyTorch, so they keep its version.
    """
    if _CUDA in key.entries or _TORCH not in key.entries:
        return key
    return Key({**key.entries, _TORCH: ANY_TORCH})


def key_of(key: Key, artifact: Artifact) -> Key:
    """Return the key under which an artifact that was built for a key is stored."""
    return key if artifact.calls_torch else key_for_any_torch(key)


def target_of_call(
    signature: Signature, weights: Mapping[str, torch.Tensor], option: Any
) -> Target:
    """Resolve the option ``target`` for the device of a call.

    Raises
    ------
    UnsupportedInput
        A weight is not a plain dense tensor, or has no memory.
    UnsupportedTarget
        The tensors are on several devices, or no code can be built for their device.
    """
    for name, weight in weights.items():
        check_weight(f"weight {name!r}", weight)
    devices = signature.devices | {weight.device for weight in weights.values()}
    if len(devices) > 1:
        raise UnsupportedTarget(
            f"inputs and weights are on {', '.join(sorted(map(str, devices)))}",
            "Move them to one device.",
        )
    device = devices.pop() if devices else torch.get_default_device()
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else None
    target = target_for(option, device.type, cpu_features(), capability)
    if target.device != device.type and autocast_text():
        raise UnsupportedTarget(
            f"autocast for tensors on {device.type!r} differs from autocast on a GPU",
            "Build without autocast, or with tensors on the GPU.",
        )
    return target


def check_place(option: Any, signature: Signature) -> None:
    """Refuse a call whose tensors are not on the device of the option ``target``.

    Raises
    ------
    UnsupportedTarget
        They are on another device.
    """
    kind = option.get("kind") if isinstance(option, Mapping) else option
    devices = {device.type for device in signature.devices}
    others = sorted(devices - {DEVICE_OF_KIND[kind]}) if kind is not None else []
    if others:
        raise UnsupportedTarget(
            f"the inputs are on {', '.join(map(repr, others))}, but the target is {kind!r}",
            "Move them, or omit target=.",
        )


def processor(key: Key) -> str:
    """Return the parts of a key that affect how long a kernel takes: see `Measurements`."""
    names = ["target", _TUNED_FOR, "tvmify", "tvm"]
    if _CUDA in key.entries:
        names += [_CUDA, _TORCH]  # its libraries are timed, too
    return "\n".join(key.entries[name] for name in names)


def is_tuned(key: Key) -> bool:
    """Whether kernels are timed for the program: no GPU is, on a machine without it."""
    return bool(key.entries[_TUNED_FOR])


def is_in_its_modes(key: Key) -> bool:
    """Whether torch's modes are those of the key; another thread may have changed them."""
    return key.entries[_MODES] == modes_text()


def _cuda_text(gpu: torch.device | None) -> str:
    driver = _ANY if gpu is None else _driver_version()
    return f"version: {torch.version.cuda}\ndriver: {driver}"


@functools.cache
def _driver_version() -> str:
    """Return the CUDA version of the driver; call it only where tensors are on a GPU."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError as error:  # PyTorch calls AMD's GPUs "cuda", too
        raise UnsupportedTarget(
            f"there is no driver for NVIDIA GPUs: {error}", "Run this in eager PyTorch."
        ) from error
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _tuned_for(target: Target, gpu: torch.device | None) -> str:
    if target.kind != "cuda":
        return f"{torch.get_num_threads()} threads of {_processor_model()}"
    return "" if gpu is None else torch.cuda.get_device_name(gpu)


@functools.cache
def _processor_model() -> str:
    """Return the processor model: models with the same features have different caches."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    return " ".join(facts[name] for name in _MODEL if name in facts)


def _weights_text(weights: Mapping[str, torch.Tensor], device: str) -> str:
    first_name: dict[int, str] = {}
    lines = []
    for name, tensor in sorted(weights.items()):
        same_as = first_name.setdefault(id(tensor), name)
        alias = "" if same_as == name else f" is {same_as}"
        lines.append(f"{name}: {TensorSpec.of(tensor).text(device)}{alias}")
    return "\n".join(lines)


def modes_text() -> str:
    """Return torch's modes that affect what a program computes, one per line."""
    modes = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if autocast := autocast_text():
        modes["autocast"] = autocast.replace("autocast ", "")
    return "\n".join(f"{name}: {value}" for name, value in modes.items())


def _tvmify_text() -> str:
    version, sources = metadata.version("tvmify"), _compiler_digest()
    return f"version: {version}\nformat: {FORMAT_VERSION}\nsources: {sources}"


@functools.cache
def _compiler_digest() -> str:
    # With the version alone, an edit of the compiler would not change keys.
    package, _, _ = __name__.partition(".")
    folder = sys.modules[package].__path__[0]  # the native part may be in another folder
    return sources.digest(Path(folder), [f"{package}.{root}" for root in _ROOTS])
