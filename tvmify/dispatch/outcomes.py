"""The memory cache of one dispatcher: its outcomes by signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, cast

from tvmify.cache import MemoryCache
from tvmify.dispatch import on_miss
from tvmify.dispatch.on_miss import Missing, is_over
from tvmify.dispatch.outcome import Eager, Outcome
from tvmify.errors import NotCompiled, TracedElsewhere, UnsupportedInput
from tvmify.options import CompileOptions

#: How many different reasons of calls without a signature are kept.
_MOST_REASONS = 16
#: The number of a module's state, and a signature.
Place: TypeAlias = tuple[int, Hashable]


class Outcomes(MemoryCache[Outcome]):
    """The outcomes of calls by state and signature, and apart from them the misses.

    Attributes
    ----------
    undescribed
        Outcomes of calls without a signature, by what keeps them from having one.
    evictions
        How many signatures had to leave for others.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        # Apart from the hits, which need no test of their kind that way.
        self._missing: MemoryCache[Eager] = MemoryCache(size)
        self.undescribed: MemoryCache[Eager] = MemoryCache(_MOST_REASONS)
        self.evictions = 0

    def is_full(self, options: CompileOptions, *, is_part: bool) -> bool:
        """Tell whether signatures that are not in memory run in eager, since others would leave.

        Each costs more than many calls in eager. So a module may evict as many signatures as it
        keeps, and then no more; a part of a module evicts none.
        """
        size = options.cache_size
        if len(self) < size:
            return False
        if is_part:
            return True
        return self.evictions >= size and not (on_miss.is_building_now() or options.strict)

    def known(self, place: Place) -> Outcome | None:
        """Return an outcome that was made before, unless it is worth making again."""
        outcome = self.peek(place) or self._missing.peek(place)
        return None if outcome is None or is_over(outcome.reason) else outcome

    def keep(self, place: Place, found_by: Place, outcome: Outcome) -> None:
        """Keep an outcome.

        Parameters
        ----------
        place
            Where the call looked for it.
        found_by
            Where later calls will look, if it is more than a miss.
        """
        if isinstance(outcome, Eager) and isinstance(outcome.why, (Missing, TracedElsewhere)):
            if isinstance(outcome.why, Missing):
                earlier = self._missing.peek(place)
                outcome.why.follow(earlier and earlier.reason)
            outcome.why.__traceback__ = None  # whose frames hold the arguments of the call
            self._missing.store(place, outcome)
        else:
            self._missing.discard(place)
            # What earlier states of the module have left behind is in nobody's way.
            evicted = cast("list[Place]", self.store(found_by, outcome))
            self.evictions += sum(state == found_by[0] for state, _ in evicted)

    def of_undescribed(self, args: Any, kwargs: Any) -> Eager:
        """Return that of a call whose arguments, or surroundings, have no signature."""
        outcome = Eager.of_undescribed(args, kwargs)
        if outcome.reason is None:
            return outcome
        cause = _cause(outcome.reason)
        known = self.undescribed.load(cause)
        if known is None:
            self.undescribed.store(cause, outcome)
        return known or outcome

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self._missing.clear()
        self.undescribed.clear()
        self.evictions = 0

    def everything(self) -> list[Outcome]:
        """Return the outcomes, then the misses, then those of calls without a signature."""
        return [*self.values(), *self._missing.values(), *self.undescribed.values()]


def _cause(reason: NotCompiled) -> Hashable:
    """Return what two calls share that have no signature for the same reason."""
    if isinstance(reason, UnsupportedInput):
        return UnsupportedInput, reason.argument, reason.kind
    return type(reason)
