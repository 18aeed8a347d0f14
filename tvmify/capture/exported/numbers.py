"""Python floats and ints that are arguments of a program rather than constants in it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tvmify.signature import LARGEST_INT

#: Integers up to here are exact in float64, and far from overflow in int64.
_EXACT = 2**53
#: Added to the largest number of float32 in double precision, this is lost.
_LOST = 1e20


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
    """Stands for a Python number while a module is recorded.

    It supports arithmetic, comparisons with tensors, and the operators in `number_operators`. With
    a tensor, they give what eager gives with a Python number: the number is rounded once, to the
    dtype that the operator computes in. Any other use (a comparison of numbers, a conversion, a
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
        """Compute arithmetic with tensors and compare with them; refuse all other functions."""
        compute = _FUNCTIONS.get(func)
        if compute is None or kwargs or len(args) != 2 or isinstance(args[0], Number):
            refuse(args, kwargs)
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

    def __eq__(self, other: Any) -> Any:
        return _compared(torch.eq, other, self)

    def __ne__(self, other: Any) -> Any:
        return _compared(torch.ne, other, self)

    def __lt__(self, other: Any) -> Any:
        return _compared(torch.gt, other, self)

    def __le__(self, other: Any) -> Any:
        return _compared(torch.ge, other, self)

    def __gt__(self, other: Any) -> Any:
        return _compared(torch.lt, other, self)

    def __ge__(self, other: Any) -> Any:
        return _compared(torch.le, other, self)

    def __pow__(self, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return torch.pow(self, other)  # type: ignore[call-overload]  # `number_operators` has it
        # Where a float may not fit, Python may raise an error.
        fits = self.fits if isinstance(self, Float) else True
        is_square = type(other) is int and other == 2 and fits
        return _compute(torch.mul, self, self) if is_square else self._needed()

    __hash__ = _needed
    __bool__ = __float__ = __int__ = __index__ = __round__ = __trunc__ = _needed
    __abs__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _needed
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _needed
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _needed
    __divmod__ = __rdivmod__ = __floor__ = __ceil__ = _needed
    __str__ = __format__ = _needed  # type: ignore[assignment]


class Float(Number):
    """Stands for a float.

    Parameters
    ----------
    is_product
        Whether it is the result of a product. Nothing may be added to it in float64: LLVM would
        fuse the two and round once less than eager.
    fits
        Whether it fits into float32 if it is finite, as arguments do.
    """

    # isinstance(scale, float) must be true, as in eager
    __class__ = property(lambda self: float)  # type: ignore[assignment]

    def __init__(
        self,
        tensor: torch.Tensor,
        places: frozenset[int],
        is_product: bool = False,
        fits: bool = True,
    ) -> None:
        super().__init__(tensor, places)
        self.is_product = is_product
        self.fits = fits

    def __abs__(self) -> Float:
        return Float(self.tensor.abs(), self.places, self.is_product, self.fits)

    def __neg__(self) -> Float:
        return Float(-self.tensor, self.places, self.is_product, self.fits)


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

    def __abs__(self) -> Int:
        return Int(self.tensor.abs(), self.places, self.bound)

    def __neg__(self) -> Int:
        return Int(-self.tensor, self.places, self.bound)


_NAMES = {
    torch.add: ("add", "__add__"),
    torch.sub: ("sub", "__sub__"),
    torch.mul: ("mul", "__mul__"),
    torch.div: ("div", "true_divide", "__truediv__"),
}
_COMPARISONS = {
    torch.eq: ("eq", "__eq__"),
    torch.ne: ("ne", "not_equal", "__ne__"),
    torch.lt: ("lt", "less", "__lt__"),
    torch.le: ("le", "less_equal", "__le__"),
    torch.gt: ("gt", "greater", "__gt__"),
    torch.ge: ("ge", "greater_equal", "__ge__"),
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    getattr(owner, name): function
    for function, names in (_NAMES | _COMPARISONS).items()
    for name in names
    for owner in (torch, torch.Tensor)
    if hasattr(owner, name)
}
_OF_PYTHON = {torch.add: operator.add, torch.sub: operator.sub, torch.mul: operator.mul}


def numbers_in(value: Any) -> list[Number]:
    """Return the numbers among a value, or the items of a list of values."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Number)]


def refuse(*values: Any) -> NoReturn:
    """Refuse to leave open the numbers among some values: the code needs to know them."""
    raise ValueNeeded(_places(*values))


def _places(*values: Any) -> frozenset[int]:
    items = [item for value in values for item in (*numbers_in(value), *_of_dict(value))]
    return frozenset[int]().union(*(item.places for item in items))


def _of_dict(value: Any) -> list[Number]:
    return numbers_in([*value.values()]) if type(value) is dict else []


def _compute(function: Callable[..., Any], left: Any, right: Any) -> Any:
    tensors = [value for value in (left, right) if isinstance(value, torch.Tensor)]
    if tensors:
        return _with_tensor(function, left, right, tensors[0])
    for value in (left, right):
        if not isinstance(value, Number) and type(value) not in (int, float):
            refuse(left, right)
    if isinstance(left, int) and isinstance(right, int) and function is not torch.div:
        return _of_ints(function, left, right)
    return _of_floats(function, left, right)


def _compared(function: Callable[..., Any], tensor: Any, number: Number) -> Any:
    return (
        _compute(function, tensor, number) if isinstance(tensor, torch.Tensor) else number._needed()
    )


def _of_ints(function: Callable[..., Any], left: Any, right: Any) -> Int:
    sizes = [value.bound if isinstance(value, Int) else abs(value) for value in (left, right)]
    bound = sizes[0] * sizes[1] if function is torch.mul else sum(sizes)
    if bound > _EXACT:
        refuse(left, right)
    tensor = _OF_PYTHON[function](_bare(left), _bare(right))
    return Int(tensor, _places(left, right), bound)


def _of_floats(function: Callable[..., Any], left: Any, right: Any) -> Float:
    is_division = function is torch.div
    if is_division and (isinstance(right, Number) or right == 0):
        refuse(left, right)  # Python raises an error where that is 0
    products = [value for value in (left, right) if isinstance(value, Float) and value.is_product]
    is_product = function is torch.mul
    if (products and not (is_product or is_division)) or not all(map(_is_exact, (left, right))):
        refuse(left, right)
    pair = [_bare(value) for value in (left, right)]
    pair = [x.to(torch.float64) if isinstance(x, torch.Tensor) else float(x) for x in pair]
    compute = operator.truediv if is_division else _OF_PYTHON[function]
    fits = _fits(function, left, right)
    return Float(compute(*pair), _places(left, right), is_product, fits)


def _fits(function: Callable[..., Any], left: Any, right: Any) -> bool:
    """Whether the result of a number and a constant fits into float32 as the number does."""
    number, constant = (left, right) if isinstance(left, Float) else (right, left)
    if not (isinstance(number, Float) and number.fits) or isinstance(constant, Number):
        return False
    if function is torch.mul:
        return abs(constant) <= 1
    if function is torch.div:
        return abs(constant) >= 1
    return abs(constant) <= _LOST


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
    is_comparison = function in _COMPARISONS
    if dtype in (torch.float16, torch.bfloat16):
        computed, result = torch.float32, dtype  # and rounded once, at the end
    elif dtype in (torch.float32, torch.float64):
        computed = result = dtype
    elif isinstance(number, int) and function is not torch.div:
        # Eager raises where the number does not fit into a smaller type.
        if dtype is not torch.int64 and (
            dtype is not torch.bool or function is torch.sub or is_comparison
        ):
            refuse(number)
        computed = result = torch.int64
    else:
        computed = result = torch.get_default_dtype()
        is_known = not dtype.is_complex and dtype is not torch.bool
        if not is_known or computed not in (torch.float32, torch.float64):
            refuse(number)  # or an error of eager
    is_sum = function in (torch.add, torch.sub)
    is_rounded = is_comparison or is_sum
    if is_sum and computed is torch.float64 and isinstance(number, Float) and number.is_product:
        refuse(number)

    def prepared(value: Any) -> torch.Tensor:
        value = _bare(value).to(computed)
        # Eager rounds the number to the tensor's type, except for products and quotients.
        return value.to(dtype) if is_rounded and dtype.is_floating_point else value

    if is_comparison:
        return function(prepared(left), prepared(right))
    return function(prepared(left).to(computed), prepared(right).to(computed)).to(result)
