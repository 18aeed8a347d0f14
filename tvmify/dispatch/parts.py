"""Interfaces for subjects that run by parts: regions or submodules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from tvmify.cache import Neighbours
from tvmify.dispatch.subject import Subject
from tvmify.errors import NotCompiled
from tvmify.signature import Args, Kwargs

if TYPE_CHECKING:
    from tvmify.dispatch.counts import CacheInfo
    from tvmify.dispatch.explanation import ExplainedSubject


class ReportsCalls(Protocol):
    """Reports what the calls of one part have done."""

    def cache_info(self) -> CacheInfo:
        """Return what its caches have done so far."""
        ...

    def explain(self, neighbours: Neighbours) -> ExplainedSubject:
        """Return what ran where, and why."""
        ...


class PartCalls(ReportsCalls, Protocol):
    """Runs the calls of one part: a `Dispatcher`."""

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run one call."""


#: Makes the dispatcher of a part.
MakePart: TypeAlias = Callable[[Subject], PartCalls]


class Parts(Protocol):
    """Runs a subject by parts: `Driven` by regions, `Children` by submodules.

    Attributes
    ----------
    reason
        Why the subject is not one program.
    how
        How the control flow runs, in words.
    has_effects
        Whether a call may have side effects.
    is_random
        Whether it may draw random numbers.
    runs_in_python
        Whether forward runs in Python, so that it may set attributes of the module, and reads them
        itself.
    """

    reason: NotCompiled
    how: str
    has_effects: bool
    is_random: bool
    runs_in_python: bool

    @property
    def parts(self) -> Sequence[ReportsCalls]:
        """Return those that are compiled separately."""
        ...

    def __call__(self, args: Args, kwargs: Kwargs, eager: Callable[[], Any]) -> Any:
        """Run one call."""

    def check(self, eager: Callable[[], Any], args: Args, kwargs: Kwargs, /) -> None:
        """Refuse a call that would differ from eager PyTorch."""

    def bind(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Take the current tensors of the module, and return them by name."""
        ...
