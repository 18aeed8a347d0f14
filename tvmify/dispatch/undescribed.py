"""Calls without a signature, because of their arguments or of torch's modes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tvmify.cache import MemoryCache
from tvmify.dispatch.outcome import Choice, Eager
from tvmify.errors import NotCompiled, UnsupportedInput, UnsupportedObject
from tvmify.runtime import autocast_text, is_being_transformed
from tvmify.signature import Args, Kwargs, Signature

#: The title of such calls.
TITLE = "arguments without a signature"
#: How many reasons are kept.
_MOST_REASONS = 16
#: Types of arguments that need no look inside.
_PLAIN = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})


class Undescribed:
    """The outcomes of calls without a signature.

    Attributes
    ----------
    by_reason
        Those of calls that do not even run by parts, by the reason or the choice.
    """

    def __init__(self) -> None:
        self.by_reason: MemoryCache[Eager] = MemoryCache(_MOST_REASONS)
        # Outcomes of calls with an object for an argument, by its class.
        self._with_objects: dict[type, Eager] = {}

    def with_object(self, args: Args, kwargs: Kwargs) -> Eager | None:
        """Return the outcome of a call with an object of a class that was seen before.

        None if there is no such object, or something else about the call is unusual as well.
        """
        found = None
        for value in (*args, *kwargs.values()):
            if (outcome := self._with_objects.get(type(value))) is not None:
                found = outcome
            elif type(value) not in _PLAIN:
                return None
        return found if _obstacle_of_modes() is None else None

    def outcome(self, args: Args, kwargs: Kwargs) -> Eager:
        """Return the outcome of a call without a signature."""
        outcome = Eager.because(_why(args, kwargs), TITLE)
        if isinstance(outcome.why, UnsupportedObject):
            for value in (*args, *kwargs.values()):
                if len(self._with_objects) < _MOST_REASONS and _is_object(value):
                    self._with_objects[type(value)] = outcome
        if outcome.parts_may_compile:
            return outcome
        cause = _cause(outcome)
        # A call that could run compiled is no miss.
        known = (self.by_reason.peek if outcome.reason is None else self.by_reason.load)(cause)
        if known is None:
            self.by_reason.store(cause, outcome)
        return known or outcome

    def clear(self) -> None:
        """Forget all outcomes."""
        self.by_reason.clear()
        self._with_objects.clear()


def key_of(outcome: Eager) -> Hashable:
    """Return what replaces the signature of a call that has none, but may run by parts.

    It is equal for calls that have none for the same reason, in the same modes.
    """
    return _cause(outcome), torch.is_grad_enabled(), autocast_text()


def _why(args: Args, kwargs: Kwargs) -> NotCompiled | Choice:
    if any(isinstance(x, fx.Proxy) for x in pytree.tree_leaves((args, kwargs))):
        return Choice.TRANSFORMED
    if (obstacle := _obstacle_of_modes()) is not None:
        return obstacle
    try:
        Signature.of(args, kwargs)
    except NotCompiled as reason:
        return reason
    return Choice.UNDESCRIBED


def _obstacle_of_modes() -> NotCompiled | Choice | None:
    """Return why no call has a signature in torch's current modes; None if calls may have one."""
    if is_being_transformed():
        return Choice.TRANSFORMED
    if forward_ad._current_level >= 0:
        return NotCompiled(
            "forward-mode differentiation is on",
            "Leave torch.autograd.forward_ad.dual_level() for calls that need no tangents.",
        )
    return None


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
    if isinstance(outcome.why, Choice):
        return outcome.why
    return type(outcome.why)
