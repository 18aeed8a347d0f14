"""TorchScript's own operators in Python. TorchScript has some 800 operators that the PyTorch
dispatcher lacks: arithmetic on Python numbers, methods of lists, dictionaries and strings, and
properties of tensors. ``torch.ops`` either lacks them or copies the list that it should change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tvmify.capture.nested import refuse_nested_tensor
from tvmify.capture.questions import refuse_question
from tvmify.capture.values import StateDict, StateList, code_of, dtype_of, is_literal, read_number
from tvmify.errors import SET_ATTRIBUTE, UnsupportedOperator
from tvmify.torch_compat.symbols import SYMBOLS, square_root


def _writes(change: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to change a container that outlives the call, since the change would be lost."""

    def checked(container: Any, *args: Any) -> Any:
        if isinstance(container, (StateList, StateDict)):
            raise UnsupportedOperator(
                [SET_ATTRIBUTE],
                "the program changes a list or dictionary that is an argument or an attribute",
            )
        return change(container, *args)

    return checked


def _in_place(name: str) -> Callable[..., Any]:
    """Call the method of that name and return the container, as ``aten::append`` does."""

    def change(container: Any, *args: Any) -> Any:
        getattr(container, name)(*args)
        return container

    return _writes(change)


def _literal_tensor(
    elements: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    return torch.tensor(elements, dtype=dtype_of(dtype), device=device)


def _as_tensor(elements: Any, dtype: Any = None, device: Any = None) -> Any:
    return torch.as_tensor(elements, dtype=dtype_of(dtype), device=device)


def _with_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the second tensor as a number if it is one that is known, as sizes in traced code are:
    with a tensor, the size of the result would be unknown.
    """

    def call(tensor: Any, *args: Any) -> Any:
        known = [
            read_number(x) if is_literal(x) and not x.dim() and x.dtype is torch.int64 else x
            for x in args
        ]
        result = function(tensor, *known)
        return list(result) if isinstance(result, tuple) else result

    return call


def _to(tensor: Any, device: Any, dtype: Any, non_blocking: bool, copy: bool) -> Any:
    # torch.Tensor.to does not accept None
    wanted = {"device": device, "dtype": dtype_of(dtype)}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    return tensor.to(non_blocking=non_blocking, copy=copy, **wanted)


def _int(value: Any) -> Any:
    number = read_number(value)
    return number if isinstance(number, torch.SymInt) else int(number)


def _float(value: Any) -> Any:
    number = read_number(value)
    return torch.sym_float(number) if isinstance(number, SYMBOLS) else float(number)


def _log(number: Any, *base: Any) -> float:
    return math.log(number, *base)


def _round_to_zero(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _affix(test: str) -> Callable[..., bool]:
    def matches(text: str, part: str, start: int = 0, end: int = -1) -> bool:
        # TorchScript's default end of -1 means the whole string, unlike Python's
        return bool(getattr(text[start : None if end == -1 else end], test)(part))

    return matches


def _percent_format(text: str, *values: Any) -> str:
    return text % (values[0] if len(values) == 1 else values)


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *args: getattr(value, name)(*args)


def _attribute(name: str) -> Callable[..., Any]:
    return lambda value: code_of(getattr(value, name))


def _nothing(*_: Any) -> None:
    return None


#: Operators by kind. The caller converts results to the type in the graph, so ``round`` may return
#: an int.
PRIMITIVES: dict[str, Callable[..., Any]] = {
    # numbers, strings and lists
    **{
        f"aten::{name}": getattr(operator, name)
        for name in ("add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne", "pow")
    },
    **{
        f"aten::{name}": getattr(math, name)
        for name in (
            "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp "
            "expm1 fabs factorial floor fmod frexp gamma gcd isfinite isinf isnan ldexp lgamma "
            "log10 log1p modf radians sin sinh tan tanh"
        ).split()
    },
    "aten::__and__": operator.and_,
    "aten::__or__": operator.or_,
    "aten::__xor__": operator.xor,
    "aten::__lshift__": operator.lshift,
    "aten::__rshift__": operator.rshift,
    "aten::__not__": operator.not_,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__contains__": operator.contains,
    "aten::__derive_index": lambda index, start, step: start + index * step,
    "aten::__range_length": lambda low, high, step: len(range(low, high, step)),
    "aten::__round_to_zero_floordiv": _round_to_zero,
    "aten::div": operator.truediv,
    "aten::divmod": divmod,
    "aten::floordiv": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::mathremainder": math.remainder,
    "aten::log": _log,
    "aten::sqrt": square_root,
    "aten::round": round,
    "aten::sum": sum,
    "aten::any": any,
    "aten::all": all,
    "aten::hex": hex,
    "aten::oct": oct,
    "aten::bin": bin,
    "aten::ord": ord,
    "aten::chr": chr,
    "prim::abs": abs,
    "prim::min": min,
    "prim::max": max,
    "prim::rangelist": lambda length: list(range(length)),
    "prim::StringIndex": operator.getitem,
    # numbers out of tensors
    "aten::Int": _int,
    "aten::Float": _float,
    "aten::Bool": lambda value: bool(read_number(value)),
    "aten::IntImplicit": read_number,
    "aten::FloatImplicit": read_number,
    "aten::ScalarImplicit": read_number,
    "aten::item": read_number,
    # containers
    "aten::len": len,
    "aten::__getitem__": operator.getitem,
    "aten::select": operator.getitem,
    "aten::slice": lambda items, start, end, step: items[start:end:step],
    "aten::list": list,
    "aten::dict": dict,
    "aten::copy": lambda items: dict(items) if isinstance(items, dict) else list(items),
    "aten::sorted": sorted,
    "aten::index": _method("index"),
    "aten::count": _method("count"),
    "aten::keys": lambda items: list(items.keys()),
    "aten::values": lambda items: list(items.values()),
    "aten::items": lambda items: list(items.items()),
    "aten::get": _method("get"),
    "aten::_set_item": _writes(operator.setitem),
    "aten::Delete": _writes(operator.delitem),
    "aten::pop": _writes(lambda items, *args: items.pop(*args)),
    "aten::popitem": _writes(lambda items: items.popitem()),
    "aten::setdefault": _writes(lambda items, *args: items.setdefault(*args)),
    "aten::sort": _writes(lambda items, descending=False: items.sort(reverse=descending)),
    "aten::add_": _writes(operator.iadd),
    "aten::mul_": _writes(operator.imul),
    **{
        f"aten::{name}": _in_place(name)
        for name in ("append", "extend", "insert", "remove", "reverse", "clear", "update")
    },
    # strings
    **{
        f"aten::{name}": _method(name)
        for name in (
            "lower upper strip lstrip rstrip title capitalize swapcase replace join zfill find "
            "rfind split rsplit splitlines partition rpartition isdigit isalpha isalnum"
        ).split()
    },
    "aten::startswith": _affix("startswith"),
    "aten::endswith": _affix("endswith"),
    "aten::format": _method("format"),
    "aten::percentFormat": _percent_format,
    "aten::str": str,
    # properties of a tensor, a device or the interpreter
    **{
        f"prim::{name}": _attribute(name)
        for name in (
            "dtype device layout is_cpu is_cuda is_meta is_mps is_xpu is_sparse is_sparse_csr "
            "is_quantized is_nested itemsize nbytes type index"
        ).split()
    },
    "prim::requires_grad": lambda tensor: tensor.requires_grad,
    "prim::grad": _nothing,
    "prim::name": _nothing,
    "prim::data": lambda tensor: tensor.detach(),
    "prim::EnumName": lambda member: member.name,
    "prim::EnumValue": lambda member: member.value,
    "aten::size": lambda tensor, *dim: tensor.size(*dim) if dim else list(tensor.size()),
    "aten::stride": lambda tensor, *dim: tensor.stride(*dim) if dim else list(tensor.stride()),
    **{
        f"aten::{name}": _method(name)
        for name in (
            "dim numel element_size is_floating_point is_complex is_signed is_contiguous cpu"
        ).split()
    },
    **{f"aten::{name}": partial(refuse_question, name) for name in ("storage_offset", "is_set_to")},
    "aten::device": torch.device,
    "aten::_infer_size": lambda a, b: list(torch.broadcast_shapes(a, b)),
    "aten::broadcast_shapes": lambda a, b: list(torch.broadcast_shapes(a, b)),
    "aten::_size_if_not_equal": lambda a, b: None if list(a) == list(b) else list(a),
    "aten::is_scripting": lambda: True,
    "aten::_get_tracing_state": lambda: False,
    "aten::is_autocast_enabled": lambda: torch.is_autocast_enabled("cuda"),
    "aten::is_autocast_cpu_enabled": lambda: torch.is_autocast_enabled("cpu"),
    "aten::is_grad_enabled": torch.is_grad_enabled,
    "aten::set_grad_enabled": _nothing,
    "aten::has_torch_function": lambda *_: False,
    "aten::warn": _nothing,  # eager shows it once
    # tensors out of Python values
    "aten::tensor": _literal_tensor,
    "aten::as_tensor": _as_tensor,
    "aten::_list_to_tensor": torch.tensor,
    "aten::numpy_T": operator.attrgetter("T"),
    "aten::matrix_H": operator.attrgetter("H"),
    "aten::mT": operator.attrgetter("mT"),
    "aten::mH": operator.attrgetter("mH"),
    "aten::copy_": lambda tensor, other: (
        tensor.copy_(other) if isinstance(other, torch.Tensor) else tensor.fill_(other)
    ),
}

#: Overloads that differ from the dispatcher's operator of the same kind.
PRIMITIVE_OVERLOADS: dict[str, Callable[..., Any]] = {
    "aten::to.prim_Device": _to,
    "aten::to.prim_dtype": lambda tensor, dtype, non_blocking, copy: _to(
        tensor, None, dtype, non_blocking, copy
    ),
    "aten::to.prim_other": lambda tensor, non_blocking, copy: _to(
        tensor, None, None, non_blocking, copy
    ),
    "aten::split": lambda tensor, sizes, dim: list(torch.split(tensor, sizes, dim)),
    "aten::narrow.Tensor": _with_number(torch.narrow),
    "aten::repeat_interleave.self_Tensor": _with_number(
        lambda x, repeats, dim, size: torch.repeat_interleave(x, repeats, dim, output_size=size)
    ),
    "aten::tensor_split.tensor_indices_or_sections": _with_number(torch.tensor_split),
    "aten::_nested_tensor_from_mask": refuse_nested_tensor,
}

#: Kinds that the dispatcher has as well, but whose Python result is needed: a list rather than a
#: tuple, or a number that is known while capturing.
PREFERRED = frozenset(
    {
        "aten::size",
        "aten::stride",
        "aten::dim",
        "aten::numel",
        "aten::storage_offset",
        "aten::is_set_to",
        "aten::is_floating_point",
        "aten::is_complex",
        "aten::is_signed",
        "aten::is_contiguous",
        "aten::item",
    }
)
