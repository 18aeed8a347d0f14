"""Dtypes of torch by their names in TVM."""

from __future__ import annotations

import torch

from tvmify.errors import UnsupportedInput
from tvmify.signature import SUPPORTED_DTYPES


def dtype_name(dtype: torch.dtype) -> str:
    """Return TVM's name of a dtype of torch; they differ only in torch's prefix."""
    return str(dtype).removeprefix("torch.")


#: TVM's names of the dtypes that its LLVM code generator supports: complex and quantized ones crash
#: the process.
DTYPES = frozenset(map(dtype_name, SUPPORTED_DTYPES))


def checked_dtype(value: torch.Tensor, name: str) -> str:
    """Return TVM's name of a tensor's dtype, if compiled code can hold it."""
    dtype = dtype_name(value.dtype)
    if dtype not in DTYPES or value.layout is not torch.strided:
        raise UnsupportedInput(
            f"{name!r} is a {value.layout} tensor of {value.dtype}",
            f"Compiled code takes strided tensors of {', '.join(sorted(DTYPES))}.",
        )
    return dtype
