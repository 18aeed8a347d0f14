"""The memory cache of one dispatcher: its outcomes by signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias, cast

from tvmify.cache import MemoryCache
from tvmify.dispatch import on_miss
from tvmify.dispatch.on_miss import Missing, is_over
from tvmify.dispatch.outcome import Eager, Outcome
from tvmify.dispatch.undescribed import Undescribed
from tvmify.errors import TracedElsewhere
from tvmify.options import CompileOptions

#: The number of a module's state, and a signature.
Place: TypeAlias = tuple[int, Hashable]


class Memory(MemoryCache[Outcome]):
    """The outcomes of calls by state and signature; disk misses are stored separately.

    Attributes
    ----------
    undescribed
        Those of calls without a signature.
    evictions
        How many signatures were evicted.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        # Separate, so that a hit needs no check of its kind.
        self._missing: MemoryCache[Eager] = MemoryCache(size)
        self.undescribed = Undescribed()
        self.evictions = 0

    def is_full(self, options: CompileOptions, *, is_part: bool) -> bool:
        """Whether new signatures run in eager, because memory is full.

        A program costs more than many calls in eager. So a module may evict as many signatures as
        it keeps, and then no more; a part of a module evicts none.
        """
        size = options.cache_size
        if len(self) < size:
            return False
        if is_part:
            return True
        return self.evictions >= size and not (on_miss.is_building_now() or options.strict)

    def known(self, place: Place) -> Outcome | None:
        """Return an existing outcome, unless it should be made again."""
        outcome = self.peek(place) or self._missing.peek(place)
        return None if outcome is None or is_over(outcome.reason) else outcome

    def keep(self, place: Place, found_by: Place, outcome: Outcome) -> None:
        """Store an outcome.

        Parameters
        ----------
        place
            Where the call looked it up.
        found_by
            Where to store it, unless it is a disk miss.
        """
        if isinstance(outcome, Eager) and isinstance(outcome.why, (Missing, TracedElsewhere)):
            if isinstance(outcome.why, Missing):
                earlier = self._missing.peek(place)
                outcome.why.follow(earlier and earlier.reason)
            outcome.why.__traceback__ = None  # its frames hold the arguments of the call
            self._missing.store(place, outcome)
        else:
            self._missing.discard(place)
            # Outcomes of earlier states of the module do not count.
            evicted = cast("list[Place]", self.store(found_by, outcome))
            self.evictions += sum(state == found_by[0] for state, _ in evicted)

    def clear(self) -> None:
        """Forget all outcomes."""
        super().clear()
        self._missing.clear()
        self.undescribed.clear()
        self.evictions = 0

    def everything(self) -> list[Outcome]:
        """Return the outcomes, then disk misses, then outcomes of calls without a signature."""
        return [*self.values(), *self._missing.values(), *self.undescribed.by_reason.values()]
