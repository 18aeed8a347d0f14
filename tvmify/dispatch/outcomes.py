"""The memory cache of one dispatcher: its outcomes by signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tvmify.cache import MemoryCache
from tvmify.dispatch import on_miss
from tvmify.dispatch.on_miss import Missing, is_over
from tvmify.dispatch.outcome import Eager, Outcome
from tvmify.errors import NotCompiled, TracedElsewhere, UnsupportedInput, UnsupportedObject
from tvmify.options import CompileOptions
from tvmify.runtime import autocast_text, is_being_transformed
from tvmify.signature import Args, Kwargs, Signature

#: How many reasons of calls without a signature are kept.
_MOST_REASONS = 16
#: Types of arguments that need no look inside.
_PLAIN = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})
#: The number of a module's state, and a signature.
Place: TypeAlias = tuple[int, Hashable]


class Outcomes(MemoryCache[Outcome]):
    """The outcomes of calls by state and signature; disk misses are stored separately.

    Attributes
    ----------
    undescribed
        Outcomes of calls without a signature, by the reason.
    evictions
        How many signatures were evicted.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        # Separate, so that a hit needs no check of its kind.
        self._missing: MemoryCache[Eager] = MemoryCache(size)
        self.undescribed: MemoryCache[Eager] = MemoryCache(_MOST_REASONS)
        # Outcomes of calls with an object for an argument, by its class.
        self._with_objects: dict[type, Eager] = {}
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

    def with_object(self, args: Args, kwargs: Kwargs) -> Eager | None:
        """Return the outcome of a call that has no signature because of an object of a class that
        was seen before; None if it has other unusual arguments, too.
        """
        found = None
        for value in (*args, *kwargs.values()):
            if (outcome := self._with_objects.get(type(value))) is not None:
                found = outcome
            elif type(value) not in _PLAIN:
                return None
        is_usual = not is_being_transformed() and forward_ad._current_level < 0
        return found if is_usual else None

    def of_undescribed(self, args: Args, kwargs: Kwargs) -> Eager:
        """Return the outcome of a call whose arguments, or whose modes, have no signature."""
        outcome = Eager.of_undescribed(args, kwargs)
        if isinstance(outcome.why, UnsupportedObject):
            for value in (*args, *kwargs.values()):
                if len(self._with_objects) < _MOST_REASONS and _is_object(value):
                    self._with_objects[type(value)] = outcome
        if outcome.reason is None or outcome.parts_may_compile:
            return outcome
        cause = _cause(outcome)
        known = self.undescribed.load(cause)
        if known is None:
            self.undescribed.store(cause, outcome)
        return known or outcome

    def clear(self) -> None:
        """Forget all outcomes."""
        super().clear()
        self._with_objects.clear()
        self._missing.clear()
        self.undescribed.clear()
        self.evictions = 0

    def everything(self) -> list[Outcome]:
        """Return the outcomes, then disk misses, then outcomes of calls without a signature."""
        return [*self.values(), *self._missing.values(), *self.undescribed.values()]


def key_of_undescribed(outcome: Eager) -> Hashable:
    """Return what replaces the signature of a call that has none, but may run by parts.

    It is equal for calls that have none for the same reason, in the same modes.
    """
    return _cause(outcome), torch.is_grad_enabled(), autocast_text()


def _is_object(value: Any) -> bool:
    """Whether it is an object whose class no signature can describe."""
    leaves = pytree.tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return False
    try:
        Signature.of((value,), {})
    except UnsupportedObject:
        return True
    except NotCompiled:
        pass  # such as a tensor
    return False


def _cause(outcome: Eager) -> Hashable:
    """Return a value that is equal for calls without a signature for the same reason."""
    if isinstance(outcome.why, UnsupportedInput):
        return UnsupportedInput, outcome.why.argument, outcome.why.kind
    return type(outcome.why)
