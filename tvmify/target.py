"""The target that TVM builds for, fully resolved, so that its text is the same on all machines."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tvmify.errors import OptionError, UnsupportedTarget


class Device(Protocol):
    """A ``torch.device``, without torch, which the command line does not need."""

    @property
    def type(self) -> str:
        """As ``torch.device.type``."""
        ...


#: What ``target=`` accepts, and what `check` turns it into.
TargetOption: TypeAlias = str | Device | Mapping[str, Any] | None
CheckedTarget: TypeAlias = str | Mapping[str, Any] | None

#: The target for each type of torch device.
TARGET_OF_DEVICE = {"cpu": "llvm", "cuda": "cuda"}
#: Kinds that ``target=`` accepts, and the type of torch device that each serves.
DEVICE_OF_KIND = {kind: device for device, kind in TARGET_OF_DEVICE.items()}
KINDS = tuple(DEVICE_OF_KIND)
#: Other names of a kind: those of the devices, where they are not the same.
_KIND_NAMED = {device: kind for device, kind in TARGET_OF_DEVICE.items() if device != kind}

#: Limits that hold on every GPU that CUDA 12 and later support, for schedules and codegen.
_GPU = {
    "max_num_threads": 1024,
    "max_shared_memory_per_block": 48 << 10,
    "max_threads_per_block": 1024,
    "registers_per_block": 65536,
    "thread_warp_size": 32,
}
#: Features that affect choices but that the generated code does not need: oneDNN has kernels for
#: them, and detects them itself.
_OF_LIBRARIES = frozenset({"amx-bf16"})
#: Ends the name of one of several devices.
_INDEX = re.compile(r":\d+$")
_ARCH = re.compile(r"sm_\d{2,3}[af]?")


@dataclass(frozen=True)
class Target:
    """A fully resolved TVM target, independent of the machine that builds.

    Attributes
    ----------
    kind
        TVM's name of the code generator: ``"llvm"`` or ``"cuda"``.
    attributes
        TVM's target attributes: ``mtriple``, ``mcpu``, ``mattr``, never ``"native"``; for a GPU,
        ``arch`` and its limits, and under ``host`` the oldest CPU that can launch the code.
    """

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return json.dumps({"kind": self.kind} | dict(self.attributes), sort_keys=True)

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse the output of ``str``."""
        attributes = json.loads(text)
        return cls(attributes.pop("kind"), attributes)

    @property
    def device(self) -> str:
        """Type of torch device whose tensors code for this target takes."""
        return DEVICE_OF_KIND[self.kind]

    @property
    def generation(self) -> int:
        """The oldest compute capability that runs the code, 90 for 9.0; 0 for the CPU."""
        return int(str(self.attributes["arch"]).strip("sm_af")) if self.kind == "cuda" else 0

    @property
    def host(self) -> Mapping[str, Any]:
        """The attributes of the CPU that runs the code or launches it."""
        return self.attributes.get("host", {}) if self.kind == "cuda" else self.attributes

    @property
    def features(self) -> frozenset[str]:
        """LLVM's names of the instruction sets that code for this target may use."""
        return frozenset(name[1:] for name in self.host.get("mattr", ()) if name[0] == "+")

    @property
    def requirements(self) -> list[str]:
        """What a machine needs to run code for this target.

        The architecture and features of its CPU; for a GPU also its architecture, as
        ``"cuda:sm_80"``.
        """
        architecture = str(self.host.get("mtriple", "")).partition("-")[0]
        features = sorted(self.features - _OF_LIBRARIES)
        needed = [*([architecture] if architecture else []), *features]
        return [*needed, f"cuda:{self.attributes['arch']}"] if self.kind == "cuda" else needed


def check(option: TargetOption) -> CheckedTarget:
    """Validate the ``target=`` option without looking at the machine; return it as TVM spells it.

    A device, or its name, means the kind that serves its type: ``"cpu"`` means ``"llvm"``. The
    index is ignored, since code runs where the tensors of a call are.

    Raises
    ------
    OptionError
        The kind is unknown (the message lists the known ones), or ``mattr`` or a GPU's ``arch`` is
        malformed.
    """
    if isinstance(option, Mapping):
        kind = option.get("kind")
        kind = _KIND_NAMED.get(kind, kind) if isinstance(kind, str) else kind
        checked: CheckedTarget = {**option, "kind": kind}
    else:
        named = None if option is None else _INDEX.sub("", str(option))
        kind = checked = _KIND_NAMED.get(named, named) if named else named
    if option is not None and kind not in KINDS:
        raise OptionError(
            f"unknown target {option!r}: choose one of {', '.join(map(repr, KINDS))}, a dict with "
            "one of these as 'kind', or leave it out to follow the device of the inputs"
        )
    features = checked.get("mattr", ()) if isinstance(checked, Mapping) else ()
    if not isinstance(features, (list, tuple)) or not all(map(_is_feature, features)):
        raise OptionError(
            f"the target's mattr is {features!r}: expected a list of LLVM's names of instruction "
            "sets, each after + or -, such as ['+avx2', '+fma']"
        )
    arch = checked.get("arch") if isinstance(checked, Mapping) and kind == "cuda" else None
    if arch is not None and not _ARCH.fullmatch(str(arch)):
        raise OptionError(f"unknown architecture {arch!r}: name one as 'sm_80' or 'sm_90a'")
    return checked


def target_for(
    option: CheckedTarget,
    device_type: str,
    cpu_features: Sequence[str],
    capability: tuple[int, int] | None = None,
) -> Target:
    """Return the target for tensors on a device.

    Parameters
    ----------
    option
        The ``target=`` option; None follows the device. The kind ``"cuda"`` with an ``arch`` also
        serves tensors on the CPU, so that a machine without a GPU can build for one.
    device_type
        ``tensor.device.type`` of the inputs.
    cpu_features
        LLVM's names of this machine's instruction sets, as reported by the native library. Code
        for a GPU does not depend on them.
    capability
        Compute capability of the inputs' GPU; not needed if the option has an ``arch``.

    Raises
    ------
    UnsupportedTarget
        No code generator serves the device, or the option names one for another device.
    """
    kind = TARGET_OF_DEVICE.get(device_type)
    given = {k: v for k, v in option.items() if k != "kind"} if isinstance(option, Mapping) else {}
    wanted = (option.get("kind") if isinstance(option, Mapping) else option) or kind
    if wanted == "cuda" and kind is not None and (capability is not None or "arch" in given):
        arch = given.get("arch") or arch_of(*capability)  # type: ignore[misc]
        # The CPU only launches kernels, so that any of its architecture will do.
        host = {"kind": "llvm"} | _host_cpu(())
        return Target("cuda", {**_GPU, "host": host, **given, "arch": arch})
    if kind is None or wanted != kind or wanted == "cuda":
        served = ", ".join(f"{device} by {name!r}" for device, name in TARGET_OF_DEVICE.items())
        raise UnsupportedTarget(
            f"the inputs are on {device_type!r}, and "
            + (f"the target is {wanted!r}" if wanted else "no target serves that device"),
            f"This version compiles for: {served}; move the inputs, change target=, or name the "
            'GPU to build for: target={"kind": "cuda", "arch": "sm_90a"}.',
        )
    return Target(kind, _host_cpu(cpu_features) | given)


def _is_feature(name: object) -> bool:
    return isinstance(name, str) and name[:1] in ("+", "-")


def arch_of(major: int, minor: int) -> str:
    """Return the architecture to build for on a GPU of this compute capability."""
    # "sm_90a" enables instructions that exist on Hopper only.
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _host_cpu(features: Sequence[str]) -> dict[str, Any]:
    # A generic CPU plus its instruction sets, not LLVM's model name: that adds tuning flags that
    # differ between equivalent machines, and "native" differs between LLVM builds.
    machine = platform.machine()
    return {
        "mtriple": f"{machine}-unknown-linux-gnu",
        "mcpu": "x86-64" if machine == "x86_64" else "generic",
        "mattr": [f"+{name}" for name in sorted(features)],
    }
