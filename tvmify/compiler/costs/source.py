"""Where a number comes from, and how a table declares one."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple


class Kind(Enum):
    """How a number was found."""

    #: By itself, with a command.
    MEASURED = "measured"
    #: Together with others, to times that a command prints.
    FITTED = "fitted"
    #: By reasoning.
    ESTIMATE = "estimate"
    #: In a vendor's manual.
    MANUAL = "manual"


@dataclass(frozen=True)
class Source:
    """Where a number comes from.

    Attributes
    ----------
    kind
        How it was found.
    commit
        The commit of this repository that brought it.
    machine, command
        What was measured, and what measures it now; empty if nothing was.
    reason
        What bounds an estimate, or which manual says it; empty if it was measured.
    """

    kind: Kind
    commit: str
    machine: str = ""
    command: str = ""
    reason: str = ""


def measured(machine: str, commit: str, command: str) -> Source:
    """Return the source of a number that a command measures."""
    return Source(Kind.MEASURED, commit, machine, command)


def fitted(machine: str, commit: str, command: str) -> Source:
    """Return the source of a number that was fitted to times which a command prints."""
    return Source(Kind.FITTED, commit, machine, command)


def estimate(commit: str, reason: str) -> Source:
    """Return the source of a number that nobody measured."""
    return Source(Kind.ESTIMATE, commit, reason=reason)


def manual(commit: str, title: str) -> Source:
    """Return the source of a number from a manual."""
    return Source(Kind.MANUAL, commit, reason=title)


#: The machines of the measurements.
VMS = "2-core virtual machines: Xeon (AVX-512), EPYC Zen 2 and 3 (AVX2), EPYC Zen 4"
XEON = "2-core virtual machine: Xeon (AVX-512)"
ZEN3 = "2-core virtual machine: EPYC (AVX2)"
ZEN4 = "2-core virtual machine: EPYC Zen 4"
ZEN5 = "2-core virtual machine: EPYC Zen 5"

#: The commands.
SEARCH = "python -m benchmarks.heuristic measure"
FIT = "python -m benchmarks.fit"
LAYERS = "python -m benchmarks.operators"
MODELS = "python -m benchmarks.run"
KERNELS = "python -m benchmarks.kernels"


def number(value: Any, unit: str, source: Source) -> Any:
    """Return a field of a table: its default is the number."""
    return field(default=value, metadata={"unit": unit, "source": source})


class Number(NamedTuple):
    """A number with its unit and source."""

    value: Any
    unit: str
    source: Source


def numbers(table: Any) -> dict[str, Number]:
    """Return the fields of a table by name."""
    return {
        one.name: Number(getattr(table, one.name), one.metadata["unit"], one.metadata["source"])
        for one in fields(table)
    }
