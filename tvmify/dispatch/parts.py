"""What runs a subject that cannot be one program, and what runs each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from tvmify.cache import Neighbours
from tvmify.dispatch.subject import Subject
from tvmify.errors import NotCompiled

if TYPE_CHECKING:
    from tvmify.dispatch.counts import CacheInfo
    from tvmify.dispatch.explained import ExplainedSubject


class PartCalls(Protocol):
    """What runs the calls of one part: a `Dispatcher`."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""

    def cache_info(self) -> CacheInfo:
        """Return what its caches have done so far."""
        ...

    def explain(self, neighbours: Neighbours | None = None) -> ExplainedSubject:
        """Return what ran where, and why."""
        ...


#: Makes what runs the calls of a part.
MakePart: TypeAlias = Callable[[Subject], PartCalls]


class Parts(Protocol):
    """Runs a subject by its parts: `Driven` by regions, `Children` by submodules.

    Attributes
    ----------
    reason
        Why the whole is not one program.
    how
        Who runs the control flow, in words.
    has_effects
        Whether a call may change more than its result.
    is_random
        Whether it may draw random numbers.
    """

    reason: NotCompiled
    how: str
    has_effects: bool
    is_random: bool

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[[], Any]
    ) -> Any:
        """Run one call."""

    def check(
        self, eager: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> None:
        """Refuse a call that would not be the same as in eager PyTorch."""

    def bind(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Take the current tensors of the module, and return them by name."""
        ...

    def cache_infos(self) -> list[CacheInfo]:
        """Return what the caches of each part have done."""
        ...

    def explain(self, neighbours: Neighbours) -> Sequence[ExplainedSubject]:
        """Return what is in each part, and where it runs."""
        ...
