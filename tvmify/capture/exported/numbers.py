"""Python floats and ints that are arguments of a program rather than constants in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from tvmify.signature import LARGEST_INT

#: Integers up to here are exact in float64, and far from overflow in int64.
_EXACT = 2**53


class ValueNeeded(BaseException):
    """The value of a number is needed. Not an Exception, so that the module cannot catch it.

    Attributes
    ----------
    places
        Indices of the numbers among the leaves of the arguments.
    """

    def __init__(self, places: frozenset[int]) -> None:
        super().__init__()
        self.places = places


class Number:
    """Stands for a Python number while a module is recorded; supports arithmetic only.

    Arithmetic with a tensor gives what eager gives with a Python number: the number is rounded
    once, to the dtype that the operator computes in. Any other use (a comparison, a conversion, a
    size, an argument of another operator) raises `ValueNeeded`.

    Parameters
    ----------
    tensor
        Without dimensions, float64 or int64.
    places
        Indices of the arguments that it was computed from.
    """

    def __init__(self, tensor: torch.Tensor, places: frozenset[int]) -> None:
        self.tensor = tensor
        self.places = places

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute supported arithmetic with tensors; refuse all other functions."""
        compute = _FUNCTIONS.get(func)
        if compute is None or kwargs or len(args) != 2 or isinstance(args[0], Number):
            _refuse(args, kwargs)
        return _compute(compute, *args)

    def _needed(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueNeeded(self.places)

    def __pos__(self) -> Number:
        return self

    def __add__(self, other: Any) -> Any:
        return _compute(torch.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _compute(torch.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _compute(torch.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _compute(torch.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _compute(torch.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _compute(torch.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _compute(torch.div, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _compute(torch.div, other, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(name)
        self._needed()

    __bool__ = __float__ = __int__ = __index__ = __hash__ = __round__ = __trunc__ = _needed
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _needed  # type: ignore[assignment]
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _needed
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _needed
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _needed
    __divmod__ = __rdivmod__ = __abs__ = __floor__ = __ceil__ = _needed
    __str__ = __format__ = _needed  # type: ignore[assignment]


class Float(Number):
    """Stands for a float.

    Parameters
    ----------
    is_product
        Whether it is the result of a product. Nothing may be added to it in float64: LLVM would
        fuse the two and round once less than eager.
    """

    # isinstance(scale, float) must be true, as in eager
    __class__ = property(lambda self: float)  # type: ignore[assignment]

    def __init__(
        self, tensor: torch.Tensor, places: frozenset[int], is_product: bool = False
    ) -> None:
        super().__init__(tensor, places)
        self.is_product = is_product

    def __neg__(self) -> Float:
        return Float(-self.tensor, self.places, self.is_product)


class Int(Number):
    """Stands for an int.

    Parameters
    ----------
    bound
        Its largest magnitude.
    """

    __class__ = property(lambda self: int)  # type: ignore[assignment]

    def __init__(
        self, tensor: torch.Tensor, places: frozenset[int], bound: int = LARGEST_INT
    ) -> None:
        super().__init__(tensor, places)
        self.bound = bound

    def __neg__(self) -> Int:
        return Int(-self.tensor, self.places, self.bound)


class TensorsOfNumbers(TorchFunctionMode):
    """Lets ``torch.tensor`` and ``torch.full`` take a `Number`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = kwargs or {}
        make = _MAKING.get(func)
        if make is not None and any(_numbers(value) for value in (*args, *kwargs.values())):
            return make(*args, **kwargs)
        return func(*args, **kwargs)


def _tensor(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any
) -> torch.Tensor:
    items = data if isinstance(data, (list, tuple)) else [data]
    is_known = all(isinstance(item, Number) or type(item) in (int, float) for item in items)
    if not is_known or any(others.values()):
        _refuse(data)
    made = [_filled(item, items, dtype) for item in items]
    result = torch.stack(made) if isinstance(data, (list, tuple)) else made[0]
    return result.to(device)


def _full(
    size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **others: Any
) -> torch.Tensor:
    # Eager raises where a float does not fit into the type.
    if _numbers(size) or any(others.values()) or not isinstance(fill_value, int):
        _refuse(size, fill_value)
    return _filled(fill_value, [fill_value], dtype).expand(tuple(size)).clone()


def _filled(item: Any, items: Sequence[Any], dtype: torch.dtype | None) -> torch.Tensor:
    are_ints = all(isinstance(other, int) for other in items)
    dtype = dtype or (torch.int64 if are_ints else torch.get_default_dtype())
    # Any int fits into these; a float cannot become an int without a warning or an error.
    takes_ints = dtype.is_floating_point or dtype in (torch.int64, torch.int32)
    if not takes_ints or (dtype in (torch.int64, torch.int32) and not are_ints):
        _refuse(items)
    if not isinstance(item, Number):
        return torch.tensor(item, dtype=dtype)
    if isinstance(item, int) and dtype is torch.int32 and item.bound > LARGEST_INT:
        _refuse(items)
    return item.tensor.to(dtype)


_MAKING: dict[Any, Callable[..., torch.Tensor]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.full: _full,
}

_NAMES = {
    torch.add: ("add", "__add__"),
    torch.sub: ("sub", "__sub__"),
    torch.mul: ("mul", "__mul__"),
    torch.div: ("div", "true_divide", "__truediv__"),
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    getattr(owner, name): function
    for function, names in _NAMES.items()
    for name in names
    for owner in (torch, torch.Tensor)
    if hasattr(owner, name)
}
_OF_PYTHON = {torch.add: operator.add, torch.sub: operator.sub, torch.mul: operator.mul}


def _numbers(value: Any) -> list[Number]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Number)]


def _refuse(*values: Any) -> NoReturn:
    raise ValueNeeded(_places(*values))


def _places(*values: Any) -> frozenset[int]:
    items = [item for value in values for item in (*_numbers(value), *_of_dict(value))]
    return frozenset[int]().union(*(item.places for item in items))


def _of_dict(value: Any) -> list[Number]:
    return _numbers([*value.values()]) if type(value) is dict else []


def _compute(function: Callable[..., Any], left: Any, right: Any) -> Any:
    tensors = [value for value in (left, right) if isinstance(value, torch.Tensor)]
    if tensors:
        return _with_tensor(function, left, right, tensors[0])
    for value in (left, right):
        if not isinstance(value, Number) and type(value) not in (int, float):
            _refuse(left, right)
    if isinstance(left, int) and isinstance(right, int) and function is not torch.div:
        return _of_ints(function, left, right)
    return _of_floats(function, left, right)


def _of_ints(function: Callable[..., Any], left: Any, right: Any) -> Int:
    sizes = [value.bound if isinstance(value, Int) else abs(value) for value in (left, right)]
    bound = sizes[0] * sizes[1] if function is torch.mul else sum(sizes)
    if bound > _EXACT:
        _refuse(left, right)
    tensor = _OF_PYTHON[function](_bare(left), _bare(right))
    return Int(tensor, _places(left, right), bound)


def _of_floats(function: Callable[..., Any], left: Any, right: Any) -> Float:
    is_division = function is torch.div
    if is_division and (isinstance(right, Number) or right == 0):
        _refuse(left, right)  # Python raises an error where that is 0
    products = [value for value in (left, right) if isinstance(value, Float) and value.is_product]
    is_product = function is torch.mul
    if (products and not (is_product or is_division)) or not all(map(_is_exact, (left, right))):
        _refuse(left, right)
    pair = [_bare(value) for value in (left, right)]
    pair = [x.to(torch.float64) if isinstance(x, torch.Tensor) else float(x) for x in pair]
    compute = operator.truediv if is_division else _OF_PYTHON[function]
    return Float(compute(*pair), _places(left, right), is_product)


def _is_exact(value: Any) -> bool:
    return type(value) is not int or abs(value) <= _EXACT


def _bare(value: Any) -> Any:
    return value.tensor if isinstance(value, Number) else value


def _with_tensor(
    function: Callable[..., Any], left: Any, right: Any, tensor: torch.Tensor
) -> torch.Tensor:
    number = left if isinstance(left, Number) else right
    if function is torch.div and number is left:  # eager computes it so
        function, tensor = torch.mul, tensor.reciprocal()
        left, right = tensor, number
    dtype = tensor.dtype
    if dtype in (torch.float16, torch.bfloat16):
        computed, result = torch.float32, dtype  # and rounded once, at the end
    elif dtype in (torch.float32, torch.float64):
        computed = result = dtype
    elif isinstance(number, int) and function is not torch.div:
        # Eager raises where the number does not fit into a smaller type.
        if dtype is not torch.int64 and (dtype is not torch.bool or function is torch.sub):
            _refuse(number)
        computed = result = torch.int64
    else:
        computed = result = torch.get_default_dtype()
        is_known = not dtype.is_complex and dtype is not torch.bool
        if not is_known or computed not in (torch.float32, torch.float64):
            _refuse(number)  # or an error of eager
    is_sum = function in (torch.add, torch.sub)
    if is_sum and computed is torch.float64 and isinstance(number, Float) and number.is_product:
        _refuse(number)

    def prepared(value: Any) -> torch.Tensor:
        return _bare(value).to(computed)

    return function(prepared(left), prepared(right)).to(result)
