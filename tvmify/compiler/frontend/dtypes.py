"""Dtypes that compiled code can hold."""

from __future__ import annotations

import torch

from tvmify.compiler.aten.bridge import PARTS
from tvmify.errors import UnsupportedInput
from tvmify.signature import SUPPORTED_DTYPES
from tvmify.torch_compat.dtypes import dtype_name

#: TVM's names of the dtypes that its LLVM code generator supports: complex and quantized ones crash
#: the process.
DTYPES = frozenset(map(dtype_name, SUPPORTED_DTYPES - PARTS.keys()))


def checked_dtype(value: torch.Tensor, name: str) -> str:
    """Return TVM's name of a tensor's dtype, or of the parts of complex numbers.

    Raises
    ------
    UnsupportedInput
        Compiled code cannot hold the tensor.
    """
    dtype = dtype_name(PARTS.get(value.dtype, value.dtype))
    if dtype not in DTYPES or value.layout is not torch.strided:
        raise UnsupportedInput(
            f"{name!r} is a {value.layout} tensor of {value.dtype}",
            "Compiled code takes strided tensors of "
            f"{', '.join(sorted(map(dtype_name, SUPPORTED_DTYPES)))}.",
        )
    return dtype
