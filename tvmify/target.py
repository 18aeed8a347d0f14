"""The target: what TVM builds for, resolved so far that two machines agree on its text."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvmify.errors import OptionError, UnsupportedTarget

#: Name of the target that serves a device of torch. The CUDA target joins here.
TARGET_OF_DEVICE = {"cpu": "llvm"}
#: Kinds that ``target=`` accepts; those that no device maps to yet run in eager, with a reason.
KINDS = ("llvm", "cuda")


@dataclass(frozen=True)
class Target:
    """A TVM target with nothing left to the machine that builds.

    Attributes
    ----------
    kind
        TVM's name of the code generator: ``"llvm"``.
    attributes
        TVM's target attributes (``mtriple``, ``mcpu``, ``mattr``), never ``"native"``.
    """

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return json.dumps({"kind": self.kind} | dict(self.attributes), sort_keys=True)

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read back what ``str`` gives."""
        attributes = json.loads(text)
        return cls(attributes.pop("kind"), attributes)

    @property
    def features(self) -> frozenset[str]:
        """LLVM's names of the instruction sets that code for this target may use."""
        return frozenset(name[1:] for name in self.attributes.get("mattr", ()) if name[0] == "+")

    @property
    def requirements(self) -> list[str]:
        """The architecture, and the features, that a CPU must have to run code for this target."""
        architecture = str(self.attributes.get("mtriple", "")).partition("-")[0]
        return [*([architecture] if architecture else []), *sorted(self.features)]

    @property
    def vector_bits(self) -> int:
        """Width in bits of the widest vector register that code for this target may use."""
        features = self.features
        if "avx512f" in features:
            return 512
        return 256 if "avx" in features else 128

    @property
    def vector_registers(self) -> int:
        """How many vector registers the instruction set has."""
        is_arm = str(self.attributes.get("mtriple", "")).startswith("aarch64")
        return 32 if is_arm or "avx512f" in self.features else 16


def check(option: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """Validate the ``target=`` option without looking at the machine.

    Raises
    ------
    OptionError
        The kind is unknown; the message names the known ones.
    """
    kind = option.get("kind") if isinstance(option, Mapping) else option
    if option is not None and kind not in KINDS:
        raise OptionError(
            f"unknown target {option!r}: choose one of {', '.join(map(repr, KINDS))}, a dict with "
            "such a 'kind', or leave it out to follow the device of the inputs"
        )
    return option


def target_for(
    option: str | Mapping[str, Any] | None, device_type: str, cpu_features: Sequence[str]
) -> Target:
    """Name the target that serves tensors of a device.

    Parameters
    ----------
    option
        The ``target=`` option; None follows the device.
    device_type
        ``tensor.device.type`` of the inputs.
    cpu_features
        LLVM's names of this machine's instruction sets, as the native library reports them.

    Raises
    ------
    UnsupportedTarget
        No code generator serves the device, or the option asks for another device's.
    """
    kind = TARGET_OF_DEVICE.get(device_type)
    wanted = (option.get("kind") if isinstance(option, Mapping) else option) or kind
    if kind is None or wanted != kind:
        served = ", ".join(f"{device} by {name!r}" for device, name in TARGET_OF_DEVICE.items())
        raise UnsupportedTarget(
            f"the inputs are on {device_type!r} and the target is {wanted or 'unnamed'!r}",
            f"This version compiles for: {served}; move the inputs, or change target=.",
        )
    given = {k: v for k, v in option.items() if k != "kind"} if isinstance(option, Mapping) else {}
    return Target(kind, _host_cpu(cpu_features) | given)


def _host_cpu(features: Sequence[str]) -> dict[str, Any]:
    # A generic CPU plus its instruction sets, not LLVM's name of the model: the name brings tuning
    # flags that make equal machines differ, and LLVM's "native" differs from one build to the next.
    machine = platform.machine()
    return {
        "mtriple": f"{machine}-unknown-linux-gnu",
        "mcpu": "x86-64" if machine == "x86_64" else "generic",
        "mattr": [f"+{name}" for name in sorted(features)],
    }
