"""TorchScript's values: enumerations, containers that outlive a call, literals."""

from __future__ import annotations

from typing import Any

import torch

from tvmify.errors import DependsOnValues

#: The values of c10::ScalarType in order: TorchScript stores a dtype as an index.
DTYPES: tuple[torch.dtype | None, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.qint8,
    torch.quint8,
    torch.qint32,
    torch.bfloat16,
    torch.quint4x2,
    torch.quint2x4,
    None,  # Bits1x8 … Bits16: internal types without arithmetic
    None,
    None,
    None,
    None,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
#: The values of c10::Layout and c10::MemoryFormat that TorchScript programs use.
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)
MEMORY_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)


class StateList(list):
    """A read-only list that outlives the call: an attribute or an argument."""


class StateDict(dict):
    """A read-only dictionary that outlives the call."""


def protect(value: Any) -> Any:
    """Copy nested lists and dictionaries as read-only ones."""
    return _rebuilt(value, StateList, StateDict)


def plain(value: Any) -> Any:
    """Copy nested lists and dictionaries as ordinary ones: the inverse of `protect`."""
    return _rebuilt(value, list, dict)


def _rebuilt(value: Any, list_kind: type[list[Any]], dict_kind: type[dict[Any, Any]]) -> Any:
    if isinstance(value, list):
        return list_kind(_rebuilt(item, list_kind, dict_kind) for item in value)
    if isinstance(value, dict):
        pairs = ((key, _rebuilt(item, list_kind, dict_kind)) for key, item in value.items())
        return dict_kind(pairs)
    if isinstance(value, tuple):
        items = [_rebuilt(item, list_kind, dict_kind) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def is_literal(value: Any) -> bool:
    """Whether a value is a tensor whose elements are known while capturing."""
    from torch._subclasses.fake_tensor import is_fake

    return isinstance(value, torch.Tensor) and not is_fake(value)


def read_number(value: Any) -> Any:
    """Return the Python number in a tensor of one element, if it is known while capturing.

    Raises
    ------
    DependsOnValues
        The tensor depends on the inputs or the weights.
    """
    if not isinstance(value, torch.Tensor):
        return value
    from tvmify.torch_compat.sizes_in_tensors import knows_number

    if not is_literal(value) and not knows_number(value):
        raise DependsOnValues(
            "a Python number is read from a tensor's values, so the program depends on them",
            "Keep the value in a tensor (torch.where instead of if), "
            "or decorate the submodules around this place.",
        )
    return value.item()


def code_of(value: Any) -> Any:
    """Return TorchScript's integer for a dtype, layout or memory format."""
    for table in (DTYPES, LAYOUTS, MEMORY_FORMATS):
        if type(value) is type(table[0]):
            return table.index(value)
    return value


def dtype_of(code: Any) -> torch.dtype | None:
    """Return the dtype for TorchScript's integer, or for None."""
    return DTYPES[code] if isinstance(code, int) else code


def recorded_contiguous(
    tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Call ``contiguous`` so that it is recorded. A tensor that is contiguous would return itself
    without a trace, but the tensor of a later call may have to be copied.
    """
    other = torch.ops.aten.alias.default(tensor)
    return torch.ops.aten.contiguous.default(other, memory_format=memory_format)
