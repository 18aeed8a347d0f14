"""Chooses among equivalent kernels: the heuristic's, unless another was measured faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from typing_extensions import TypeVarTuple, Unpack

if TYPE_CHECKING:
    from tvmify.compiler.kernels.common.sample import Sample

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Choices:
    """What legalizers and rules are to choose while a program is compiled.

    Attributes
    ----------
    accuracy
        ``"default"`` or ``"strict"``, see `tvmify.options.CompileOptions`.
    measured
        The name of the fastest candidate that was measured, by workload.
    is_collecting
        Whether candidates are wanted. If not, whole functions, whose workloads take time to name,
        are left out.
    most
        How many candidates of a workload are worth measuring. The heuristic lists the most
        promising ones first.
    known
        The results of `once`, also for copies with other fields.
    """

    accuracy: str = "default"
    measured: Mapping[str, str] = field(default_factory=dict)
    is_collecting: bool = False
    most: int = 6
    known: dict[object, Any] = field(default_factory=dict)


@dataclass
class Collected:
    """What could be chosen while a program was compiled.

    Attributes
    ----------
    candidates
        Their names for each workload, the heuristic's choice first.
    samples
        What to measure, for each workload that is not a single operator.
    """

    candidates: dict[str, list[str]] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)


class _Current(NamedTuple):
    choices: Choices
    collected: Collected


_CURRENT: ContextVar[_Current | None] = ContextVar("choices", default=None)


@contextmanager
def choosing(choices: Choices) -> Iterator[Collected]:
    """Make `choose` and `is_strict` follow these choices; yield what `choose` is asked."""
    current = _Current(choices, Collected())
    token = _CURRENT.set(current)
    try:
        yield current.collected
    finally:
        _CURRENT.reset(token)


def is_strict() -> bool:
    """Whether errors of kernels must stay within twice those of eager."""
    return _current().choices.accuracy == "strict"


def is_collecting() -> bool:
    """Whether candidates are being collected."""
    return _current().choices.is_collecting


def is_measured() -> bool:
    """Whether anything was measured; otherwise expensive names of workloads can be skipped."""
    return bool(_current().choices.measured)


def choose(workload: str, candidates: Sequence[T], sample: Callable[[], Sample] | None = None) -> T:
    """Return the candidate that was measured to be the fastest for a workload, or the first.

    Parameters
    ----------
    workload
        Everything that decides how fast a candidate is: the operator with its shapes, dtypes and
        attributes, but not the processor, by which measurements are stored.
    candidates
        Ordered by the heuristic. ``str`` of each is its name, and must be the same in every
        process.
    sample
        Returns what to measure, if not the operator that is being lowered.
    """
    choices, collected = _current()
    names = [str(candidate) for candidate in candidates]
    if sample is not None and workload not in collected.samples:
        collected.samples[workload] = sample()
    collected.candidates.setdefault(workload, names[: choices.most])
    return settled(workload, candidates)


def once(find: Callable[[Unpack[Arguments]], T], *args: Unpack[Arguments]) -> T:
    """Return what a function finds for these arguments. It is called once in a compilation: the
    layers of a model are alike, and estimating what suits them takes longer than describing them.
    """
    known = _current().choices.known
    key = find, args
    if key not in known:
        known[key] = find(*args)
    return known[key]


def settled(workload: str, candidates: Sequence[T]) -> T:
    """Return the result of `choose` without recording the workload."""
    best = _current().choices.measured.get(workload)
    return next((one for one in candidates if str(one) == best), candidates[0])


def _current() -> _Current:
    return _CURRENT.get() or _Current(Choices(), Collected())
