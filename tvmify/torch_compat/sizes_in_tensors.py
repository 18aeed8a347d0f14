"""Sizes that code puts into tensors, computes with there, and uses as sizes again.

PyTorch takes the elements of such a tensor for data, which no size of a recorded program may depend
on. So a program would serve a single size: DeBERTa slices a table by ``torch.tensor(length)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_WHOLE = (torch.int32, torch.int64)


class SizesInTensors(TorchFunctionMode):
    """Follows the elements of tensors without axes that were made of symbolic sizes.

    Use around ``torch.export``. What takes sizes gets the symbols in place of these tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        if name in _DIVISIONS and args and isinstance(args[0], torch.SymInt):
            # As in eager, which makes a tensor of a number.
            size: Any = args[0]
            dividend = torch.scalar_tensor(size, dtype=torch.int64)
            self._numbers[dividend] = args[0]
            args = (dividend, *args[1:])
        if name in _MAKE:
            return self._made(func, args, kwargs)
        known = [leaf for leaf in _leaves((args, kwargs)) if self.knows(leaf)]
        if not known:
            return func(*args, **kwargs)
        if name in ("item", "tolist"):
            return self._numbers[known[0]]
        if func is torch.Tensor.__bool__:
            return bool(self._numbers[known[0]])  # a guard
        number = self._computed(name, args, kwargs)
        is_wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dim() > 0
        if name in _TAKE_SIZES or (name in _TAKE_LIMITS and is_wide):
            skipped = 0 if name in _FACTORIES else 1
            args = (*args[:skipped], *pytree.tree_map(self._number_of, args[skipped:]))
            kwargs = pytree.tree_map(self._number_of, kwargs)
        result = func(*args, **kwargs)
        shares_memory = self._forget_memory_of(result, known)
        if number is None or not isinstance(result, torch.Tensor):
            return result
        kinds = (torch.bool,) if name in _COMPARISONS else _WHOLE
        if result.dtype in kinds and (result is args[0] or not shares_memory):
            self._numbers[result] = number
        return result

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else None
        if func is torch.as_tensor and isinstance(value, torch.SymInt) and len(args) == 1:
            func, kwargs = torch.scalar_tensor, {"dtype": torch.int64} | kwargs
        result = func(*args, **kwargs)
        if isinstance(value, torch.SymInt) and result.dtype in _WHOLE:
            self._numbers[result] = value
        return result

    def _computed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the element of a result; None if it is not known."""
        if not args:  # by keywords
            return None
        numbers = [self._number_of(x) for x in args]
        if name in _SAME:
            return numbers[0]
        if not all(isinstance(x, int | torch.SymInt) and not isinstance(x, bool) for x in numbers):
            return None
        if name in _SUMS:
            factor = kwargs.get("alpha", numbers[2] if len(numbers) > 2 else 1)
            return _COMPUTE[name](numbers[0], numbers[1] * factor)
        if name in _DIVISIONS:
            mode = kwargs.get("rounding_mode", _DIVISIONS[name])
            if mode == "floor" or (mode == "trunc" and all(x >= 0 for x in numbers)):
                return operator.floordiv(*numbers)
            return None
        function = _COMPUTE.get(name)
        return None if function is None or kwargs else function(*numbers)

    def knows(self, value: Any) -> bool:
        """Whether a value is a tensor whose element was made of sizes."""
        return isinstance(value, torch.Tensor) and value in self._numbers

    def _number_of(self, value: Any) -> Any:
        if isinstance(value, slice):
            return slice(*(map(self._number_of, (value.start, value.stop, value.step))))
        return self._numbers[value] if self.knows(value) else value

    def _forget_memory_of(self, result: Any, known: list[torch.Tensor]) -> bool:
        """Forget tensors that a function may have written to, or that have a view now, and return
        whether there are any.
        """
        results = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        memory = {x.untyped_storage()._cdata for x in results}
        # An assignment returns nothing.
        gone = [x for x in known if result is None or x.untyped_storage()._cdata in memory]
        for tensor in gone:
            self._numbers.pop(tensor, None)
        return bool(gone)


def _leaves(arguments: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(arguments):
        yield from (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)


def knows_number(tensor: torch.Tensor) -> bool:
    """Whether ``tensor.item()`` is a symbol, or a number that does not depend on data."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return True
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, SizesInTensors) and mode.knows(tensor) for mode in modes)


#: What makes a tensor of a number.
_MAKE = frozenset("tensor as_tensor scalar_tensor".split())
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "radd": operator.add,
    "sub": operator.sub,
    "subtract": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "multiply": operator.mul,
    "rmul": operator.mul,
    "remainder": operator.mod,
    "mod": operator.mod,
    "neg": operator.neg,
    "minimum": torch.sym_min,
    "maximum": torch.sym_max,
    **{name: getattr(operator, name) for name in _COMPARISONS},
}
_SUMS = frozenset("add sub".split())
#: How each rounds, unless it is told.
_DIVISIONS = {"div": None, "divide": None, "floor_divide": "floor", "floordiv": "floor"}
_SAME = frozenset("clone detach contiguous long int to cpu".split())
_FACTORIES = frozenset("zeros ones empty full rand randn arange eye linspace".split())
_TAKE_SIZES = _FACTORIES | frozenset(
    "getitem setitem view reshape expand broadcast_to as_strided repeat tile narrow split pad "
    "tensor_split unflatten roll new_zeros new_ones new_empty new_full repeat_interleave "
    "topk".split()
)
#: What takes a number in place of a tensor without axes, whose dtype then counts as little.
_TAKE_LIMITS = ("clamp", "clip")
