"""Python floats whose values are arguments of a program, and not part of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch


class FloatValueNeeded(BaseException):
    """The value of a float is asked for; no Exception, lest the module should swallow it."""


def _needed(*_: Any, **__: Any) -> NoReturn:
    raise FloatValueNeeded


class Float:
    """Stands for a Python float while a module is recorded: it can be computed with, and no more.

    With a tensor it computes what eager does with a Python float: the float is rounded once, to the
    dtype that the operator computes in. Whatever else would be done with it (a comparison, a
    conversion, an argument of another operator) raises `FloatValueNeeded`.

    Parameters
    ----------
    tensor
        Without dimensions, float64.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    # isinstance(scale, float) has to be true as it is in eager
    __class__ = property(lambda self: float)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute with tensors what is known, and nothing else."""
        compute = _FUNCTIONS.get(func)
        if compute is None or kwargs or len(args) != 2 or type(args[0]) is Float:
            raise FloatValueNeeded
        return _compute(compute, *args)

    def __neg__(self) -> Float:
        return Float(-self.tensor)

    def __pos__(self) -> Float:
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
        if isinstance(other, torch.Tensor):
            return _compute(torch.mul, other.reciprocal(), self)  # as eager does
        return _compute(torch.div, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _compute(torch.div, other, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks for
            raise AttributeError(name)
        raise FloatValueNeeded

    __bool__ = __float__ = __int__ = __index__ = __hash__ = __round__ = __trunc__ = _needed
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _needed  # type: ignore[assignment]
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _needed
    __divmod__ = __rdivmod__ = __abs__ = __floor__ = __ceil__ = _needed
    __str__ = __format__ = _needed  # type: ignore[assignment]


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
#: On numbers alone. Not products: LLVM would join them with sums, and round once less than eager.
_ON_NUMBERS = {torch.add: operator.add, torch.sub: operator.sub}


def _compute(function: Callable[..., Any], left: Any, right: Any) -> Any:
    tensors = [value for value in (left, right) if isinstance(value, torch.Tensor)]
    if tensors:
        return _with_tensor(function, left, right, tensors[0])
    if function not in _ON_NUMBERS:
        raise FloatValueNeeded
    return Float(_ON_NUMBERS[function](_number(left), _number(right)))


def _number(value: Any) -> Any:
    if type(value) is Float:
        return value.tensor
    if type(value) is float or (type(value) is int and abs(value) <= 2**53):
        return value
    raise FloatValueNeeded


def _with_tensor(
    function: Callable[..., Any], left: Any, right: Any, tensor: torch.Tensor
) -> torch.Tensor:
    dtype = tensor.dtype
    if dtype in (torch.float16, torch.bfloat16):
        computed, result = torch.float32, dtype  # and rounded once, at the end
    elif dtype in (torch.float32, torch.float64):
        computed = result = dtype
    else:
        computed = result = torch.get_default_dtype()
        is_known = not dtype.is_complex and dtype is not torch.bool
        if not is_known or computed not in (torch.float32, torch.float64):
            raise FloatValueNeeded  # or an error of eager

    def prepared(value: Any) -> torch.Tensor:
        return (value.tensor if type(value) is Float else value).to(computed)

    return function(prepared(left), prepared(right)).to(result)
