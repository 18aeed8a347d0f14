"""Operators of PyTorch that take Python numbers, for numbers that are arguments of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tvmify.capture.exported.numbers import Float, Int, Number, numbers_in, refuse
from tvmify.signature import LARGEST_INT


class TakingNumbers(TorchFunctionMode):
    """Lets functions of PyTorch take a `Number`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = kwargs or {}
        take = _TAKING.get(func)
        if take is not None and any(numbers_in(value) for value in (*args, *kwargs.values())):
            return take(*args, **kwargs)
        return func(*args, **kwargs)


def _tensor(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any
) -> torch.Tensor:
    items = data if isinstance(data, (list, tuple)) else [data]
    is_known = all(isinstance(item, Number) or type(item) in (int, float) for item in items)
    if not is_known or any(others.values()):
        refuse(data)
    made = [_filled(item, items, dtype) for item in items]
    result = torch.stack(made) if isinstance(data, (list, tuple)) else made[0]
    return result.to(device)


def _scalar_tensor(
    s: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any
) -> torch.Tensor:
    # unlike torch.tensor, it makes floats of integers
    return _tensor(s, dtype=dtype or torch.get_default_dtype(), device=device, **others)


def _full(
    size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **others: Any
) -> torch.Tensor:
    if numbers_in(size) or any(others.values()):
        refuse(size, fill_value)
    default = torch.int64 if isinstance(fill_value, int) else torch.get_default_dtype()
    return _fitting(fill_value, dtype or default).expand(tuple(size)).clone()


def _full_like(
    input: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **others: Any
) -> torch.Tensor:
    if any(others.values()):
        refuse(fill_value)
    number = _fitting(fill_value, dtype or input.dtype)
    return torch.zeros_like(input, dtype=number.dtype).copy_(number)


def _new_full(
    input: Any, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **others: Any
) -> torch.Tensor:
    return _full(size, fill_value, dtype=dtype or input.dtype, **others)


def _clamp(input: Any, min: Any = None, max: Any = None, **others: Any) -> torch.Tensor:
    bounds = [bound for bound in (min, max) if bound is not None]
    if any(others.values()) or any(isinstance(bound, torch.Tensor) for bound in bounds):
        refuse(input, *bounds)
    dtype = _promoted(input, *bounds)
    min, max = (None if bound is None else _fitting(bound, dtype) for bound in (min, max))
    return torch.clamp(input.to(dtype), min, max)


def _where(condition: Any, input: Any, other: Any, **others: Any) -> torch.Tensor:
    if any(others.values()) or isinstance(condition, Number):
        refuse(condition, input, other)
    dtype = _promoted(input, other)
    branches = [
        value.to(dtype) if isinstance(value, torch.Tensor) else _fitting(value, dtype)
        for value in (input, other)
    ]
    return torch.where(condition, *branches)


def _masked_fill(input: Any, mask: Any, value: Any) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        refuse(value)
    return torch.where(mask, _fitting(value, input.dtype), input)


def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> torch.Tensor:
    if not input.is_floating_point():
        refuse(negative_slope)  # eager raises an error
    slope = _fitting(negative_slope, input.dtype)
    result = torch.where(input > 0, input, input * slope)
    return input.copy_(result) if inplace else result


def _threshold(input: Any, threshold: Any, value: Any, inplace: bool = False) -> torch.Tensor:
    if not input.is_floating_point():
        refuse(threshold, value)
    limit, filling = (_fitting(number, input.dtype) for number in (threshold, value))
    result = torch.where(input <= limit, filling, input)
    return input.copy_(result) if inplace else result


def _lerp(input: Any, end: Any, weight: Any, **others: Any) -> torch.Tensor:
    if any(others.values()):
        refuse(weight)
    return torch.lerp(input, end, _fitting(weight, input.dtype))


def _add(input: Any, other: Any, *, alpha: Any = 1, **others: Any) -> torch.Tensor:
    if not isinstance(alpha, Number):
        return torch.add(input, other, **_but_one(alpha), **others)
    return torch.add(input, _multiplied(alpha, input, other, **others))


def _sub(input: Any, other: Any, *, alpha: Any = 1, **others: Any) -> torch.Tensor:
    if not isinstance(alpha, Number):
        return torch.sub(input, other, **_but_one(alpha), **others)
    return torch.sub(input, _multiplied(alpha, input, other, **others))


def _but_one(alpha: Any) -> dict[str, Any]:
    return {} if alpha == 1 else {"alpha": alpha}


def _addcmul(
    input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1, **others: Any
) -> torch.Tensor:
    return input + _multiplied(value, input, tensor1, **others) * tensor2


def _addcdiv(
    input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1, **others: Any
) -> torch.Tensor:
    if not input.is_floating_point():
        refuse(value)  # eager raises an error
    return input + _multiplied(value, input, tensor1, **others) / tensor2


def _multiplied(number: Any, input: Any, tensor: Any, **others: Any) -> torch.Tensor:
    """Return a tensor times the number by which an operator multiplies it, to add it to another."""
    is_known = isinstance(tensor, torch.Tensor) and tensor.dtype is input.dtype
    if any(others.values()) or not is_known:
        refuse(number, tensor)
    return _fitting(number, input.dtype) * tensor


def _in_place(take: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function that writes a result into its first argument."""

    def write(input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = take(input, *args, **kwargs)
        if result.dtype is not input.dtype:
            refuse(*args, *kwargs.values())  # eager raises an error
        return input.copy_(result)

    return write


def _promoted(*values: Any) -> torch.dtype:
    """Return the dtype of an operator of a tensor and numbers, or of numbers only."""
    dtypes = [value.dtype for value in values if isinstance(value, torch.Tensor)]
    if len(dtypes) > 1 or torch.bool in dtypes:
        refuse(*values)
    dtype = dtypes[0] if dtypes else torch.int64
    has_float = any(isinstance(value, float) for value in values)
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return torch.get_default_dtype() if has_float and is_integer else dtype


def _fitting(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor of the dtype to which eager converts it.

    Eager raises an error if the number is too large for it, so types that are too small for some
    numbers are refused.
    """
    if not isinstance(value, Number):
        return torch.full((), value, dtype=dtype)  # or eager's error
    is_wide = isinstance(value, Float) and not value.fits
    is_known = dtype is torch.float64 or (dtype is torch.float32 and not is_wide)
    if isinstance(value, Int):
        is_known |= dtype is torch.int64 or (dtype is torch.int32 and value.bound <= LARGEST_INT)
    if not is_known:
        refuse(value)
    return value.tensor.to(dtype)


def _filled(item: Any, items: Sequence[Any], dtype: torch.dtype | None) -> torch.Tensor:
    are_ints = all(isinstance(other, int) for other in items)
    dtype = dtype or (torch.int64 if are_ints else torch.get_default_dtype())
    # Any int fits into these; a float cannot become an int without a warning or an error.
    takes_ints = dtype.is_floating_point or dtype in (torch.int64, torch.int32)
    if not takes_ints or (dtype in (torch.int64, torch.int32) and not are_ints):
        refuse(items)
    if not isinstance(item, Number):
        return torch.tensor(item, dtype=dtype)
    if isinstance(item, int) and dtype is torch.int32 and item.bound > LARGEST_INT:
        refuse(items)
    return item.tensor.to(dtype)


def _with_number(
    function: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return a function of a tensor of floats and a number, which becomes a tensor."""

    def take(input: Any, other: Any, **others: Any) -> torch.Tensor:
        tensor = input if isinstance(input, torch.Tensor) else other
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            refuse(input, other)
        pair = (x if x is tensor else _fitting(x, tensor.dtype) for x in (input, other))
        return function(*pair, **others)

    return take


def _pow(input: Any, exponent: Any) -> torch.Tensor:
    if not isinstance(exponent, (Float, torch.Tensor)):
        refuse(input, exponent)  # a small int, for which there is faster code
    result = _with_number(torch.pow)(input, exponent)
    if isinstance(exponent, torch.Tensor):
        return result
    # As in eager: the square root of minus infinity is NaN.
    return torch.where(exponent.tensor == 0.5, input.sqrt(), result)


def _rounded_quotient(
    input: Any, other: Any, *, rounding_mode: str | None = None, **others: Any
) -> torch.Tensor:
    if rounding_mode is None:
        return torch.div(input, other, **others)
    return _with_number(torch.div)(input, other, rounding_mode=rounding_mode)


def _elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> torch.Tensor:
    if not input.is_floating_point():
        refuse(alpha)  # eager raises an error
    result = torch.where(input > 0, input, torch.expm1(input) * _fitting(alpha, input.dtype))
    return input.copy_(result) if inplace else result


def _softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> torch.Tensor:
    if not input.is_floating_point():
        refuse(beta, threshold)  # eager raises an error
    beta, threshold = (_fitting(number, input.dtype) for number in (beta, threshold))
    scaled = input * beta
    return torch.where(scaled > threshold, input, scaled.exp().log1p() / beta)


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> torch.Tensor:
    if mode != "constant" or numbers_in(pad):
        refuse(pad, value)
    inside = torch.nn.functional.pad(torch.ones_like(input, dtype=torch.bool), pad)
    padded = torch.nn.functional.pad(input, pad)
    return torch.where(inside, padded, _fitting(value, input.dtype))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if numbers_in([attn_mask, dropout_p]):
        refuse(attn_mask, dropout_p, scale)
    return torch.nn.functional.scaled_dot_product_attention(
        query * _fitting(scale, query.dtype),
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=1.0,
        enable_gqa=enable_gqa,
    )


def _normalize(
    input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None
) -> torch.Tensor:
    if numbers_in([p, dim]) or out is not None:
        refuse(p, dim, eps)
    length = input.norm(p, dim, keepdim=True)
    return input / _clamp(length, min=eps).expand_as(input)


def _fill(input: Any, value: Any) -> torch.Tensor:
    return input.copy_(_fitting(value, input.dtype))


def _set_item(input: Any, index: Any, value: Any) -> None:
    if numbers_in(index):
        refuse(index, value)
    input[index] = _fitting(value, input.dtype)


def _clamp_max(input: Any, max: Any) -> torch.Tensor:
    return _clamp(input, max=max)


_TAKING: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.scalar_tensor: _scalar_tensor,
    torch.full: _full,
    torch.full_like: _full_like,
    torch.Tensor.new_full: _new_full,
    torch.where: _where,
    torch.Tensor.where: lambda input, condition, other: _where(condition, input, other),
    torch.nn.functional.leaky_relu: _leaky_relu,
    torch.nn.functional.threshold: _threshold,
    torch.nn.functional.elu: _elu,
    torch.nn.functional.softplus: _softplus,
    torch.nn.functional.pad: _pad,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.nn.functional.normalize: _normalize,
    torch.Tensor.fill_: _fill,
    torch.Tensor.__setitem__: _set_item,
}
for _names, _take in {
    ("pow", "__pow__"): _pow,
    ("remainder", "__mod__"): _with_number(torch.remainder),
    ("fmod",): _with_number(torch.fmod),
    ("floor_divide", "__floordiv__"): _with_number(torch.floor_divide),
    ("div", "divide"): _rounded_quotient,
}.items():
    _TAKING |= {
        getattr(place, name): _take
        for name in _names
        for place in (torch, torch.Tensor)
        if hasattr(place, name)
    }
for _name, _take in {
    "add": _add,
    "sub": _sub,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "masked_fill": _masked_fill,
}.items():
    _TAKING |= dict.fromkeys((getattr(torch, _name), getattr(torch.Tensor, _name)), _take)
    _TAKING[getattr(torch.Tensor, f"{_name}_")] = _in_place(_take)
for _names, _take in {
    ("mul_", "multiply_", "__imul__"): torch.mul,
    ("div_", "divide_", "true_divide_", "__itruediv__"): torch.div,
    ("__iadd__",): torch.add,
    ("__isub__",): torch.sub,
}.items():
    _TAKING |= {getattr(torch.Tensor, _name): _in_place(_take) for _name in _names}
