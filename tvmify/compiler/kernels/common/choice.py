"""Which of several ways to do the same work: the rule's, unless another was measured faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choices:
    """What legalizers and rules may choose among while one program is compiled.

    Attributes
    ----------
    accuracy
        ``"default"`` or ``"strict"``, see `tvmify.options.CompileOptions`.
    measured
        For a workload the name of the candidate that was measured to be the fastest.
    asked
        Filled as the program is compiled: for each workload the names of its candidates, the
        heuristic's choice first.
    samples
        Filled likewise: for a workload that is no operator by itself a
        `tvmify.compiler.kernels.common.sample.Sample`.
    asks
        Whether somebody reads these. Else whole functions, whose workloads take time to name, are
        not among them.
    most
        So many candidates of a workload are worth their time. The heuristic lists the more
        promising ones first.
    """

    accuracy: str = "default"
    measured: Mapping[str, str] = field(default_factory=dict)
    asked: dict[str, list[str]] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    asks: bool = False
    most: int = 6


_CURRENT: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextmanager
def choosing(choices: Choices) -> Iterator[Choices]:
    """Let `choose` and `is_strict` follow these choices."""
    token = _CURRENT.set(choices)
    try:
        yield choices
    finally:
        _CURRENT.reset(token)


def is_strict() -> bool:
    """Whether only kernels are allowed whose errors stay within twice those of eager."""
    return _current().accuracy == "strict"


def is_asking() -> bool:
    """Whether somebody wants to know what there is to choose among."""
    return _current().asks


def is_measured() -> bool:
    """Whether anything was measured: else no workload need be named that takes time to name."""
    return bool(_current().measured)


def choose(workload: str, candidates: Sequence[T], sample: Callable[[], Any] | None = None) -> T:
    """Return the candidate measured fastest for a workload, else the first.

    Parameters
    ----------
    workload
        All that decides how fast a candidate is: the operator with its shapes, dtypes and
        attributes. Not the processor, which measurements are kept apart for.
    candidates
        In the order in which the heuristic likes them. ``str`` of each is its name, and has to be
        the same in every process.
    sample
        Returns what to measure it by, where that is not the operator that is being lowered.
    """
    current = _current()
    names = [str(candidate) for candidate in candidates]
    if sample is not None and workload not in current.samples:
        current.samples[workload] = sample()
    current.asked.setdefault(workload, names[: current.most])
    return settled(workload, candidates)


def settled(workload: str, candidates: Sequence[T]) -> T:
    """Return what `choose` would, without asking that it be measured."""
    best = _current().measured.get(workload)
    return next((one for one in candidates if str(one) == best), candidates[0])


def _current() -> Choices:
    return _CURRENT.get() or Choices()
