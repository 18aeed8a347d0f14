"""The call that ``torch.export`` records: arguments to hide from it, and arguments to keep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact.objects import is_size
from tvmify.capture.exported.number_operators import TakingNumbers
from tvmify.capture.exported.numbers import Float, Int, Number, ValueNeeded
from tvmify.capture.exported.tensor_state import TensorState
from tvmify.capture.questions import refusing_unrecorded
from tvmify.capture.twin import with_forward
from tvmify.capture.varying import STATIC, Varying, check_sizes
from tvmify.errors import NeedsPython, NumberNeeded
from tvmify.signature import NumberArgument, SizeArgument

#: Values that operators take but ``torch.export`` does not accept as arguments.
_HIDDEN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class RecordedCall:
    """The arguments of a call, some of them hidden from ``torch.export``.

    Parameters
    ----------
    args, kwargs
        A `NumberArgument` is a number of any value.
    repeated
        Which tensors are the same object in forward; see `repetitions`.
    varying
        Sizes that are recorded as symbols.

    Attributes
    ----------
    args, kwargs
        For ``torch.export``: with None for each value that it does not accept, and a tensor for
        each `NumberArgument`.
    has_numbers
        Whether there is a `NumberArgument`.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        repeated: Mapping[int, int],
        varying: Varying = STATIC,
    ) -> None:
        self._repeated = repeated
        self._varying = varying
        self._leaves, self._structure = pytree.tree_flatten((args, kwargs), is_leaf=is_size)
        self.has_numbers = any(isinstance(leaf, NumberArgument) for leaf in self._leaves)
        self.args, self.kwargs = pytree.tree_map(_shown, (args, kwargs), is_leaf=is_size)

    def attach(
        self, module: torch.nn.Module, around: Callable[[torch.nn.Module, Callable[[], Any]], Any]
    ) -> None:
        """Give a module the hidden arguments, and refuse changes of its arguments.

        Parameters
        ----------
        module
            Is given another class.
        around
            Takes the module and a function that runs the call, and returns its result.
        """
        cls = type(module)
        # A method may stand in for forward: callers of the module expect forward.
        own_forward = getattr(cls, "__tvmify_forward__", None)
        is_running = False

        @functools.wraps(cls.forward)
        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_running
            if is_running:
                return (own_forward or cls.forward)(module, *args, **kwargs)
            is_running = True
            try:
                return around(module, lambda: self._run(cls.forward, module, args, kwargs))
            finally:
                is_running = False

        module.__class__ = with_forward(cls, forward)

    def _run(
        self,
        forward: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # torch.export may have reordered the keyword arguments.
        found = pytree.tree_leaves((args, {name: kwargs[name] for name in self.kwargs}))
        check_sizes(found, self._varying)
        places = enumerate(found)
        leaves = [_given(places, hidden) for hidden in self._leaves]
        leaves = [leaves[self._repeated.get(place, place)] for place in range(len(leaves))]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        state = TensorState(leaves, module.parameters())
        try:
            numbers = TakingNumbers() if self.has_numbers else nullcontext()
            with numbers, refusing_unrecorded():
                result = forward(module, *args, **kwargs)
            state.check(result)
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Number):
                    raise ValueNeeded(leaf.places)
        except ValueNeeded as needed:
            raise NumberNeeded(needed.places) from None
        now = pytree.tree_leaves((args, kwargs), is_leaf=is_size)
        if len(now) != len(leaves) or any(a is not b for a, b in zip(now, leaves, strict=True)):
            raise NeedsPython(
                "forward changes a list, dict or object that is one of its arguments",
                "Return the new value instead.",
            )
        return result


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, SizeArgument):
        return leaf.carrier(leaf.value)
    if isinstance(leaf, NumberArgument):
        dtype = torch.float64 if leaf.kind is float else torch.int64
        return torch.zeros((), dtype=dtype, device="cpu")
    if isinstance(leaf, torch.Size):
        return (None,) * len(leaf)  # as many leaves as it has in a call
    return None if isinstance(leaf, _HIDDEN) else leaf


def _given(found: Iterator[tuple[int, Any]], hidden: Any) -> Any:
    if isinstance(hidden, torch.Size):
        for _ in hidden:
            next(found)
        return hidden
    place, leaf = next(found)
    if isinstance(hidden, SizeArgument):
        return leaf.shape[0]
    if isinstance(hidden, NumberArgument):
        return (Float if hidden.kind is float else Int)(leaf, frozenset({place}))
    return hidden if isinstance(hidden, _HIDDEN) else leaf
