"""The dtypes that kernels for GPUs compute in, and how many elements a load of them has."""

from __future__ import annotations

import tvm

from tvmify.compiler.costs import GPU

FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32"})
#: Dtypes that TVM has vectors of; vectors of bool have another layout in memory than PyTorch's.
VECTOR_DTYPES = FLOAT_DTYPES | {"int32"}


def vector_lanes(dtype: str) -> int:
    """Return how many elements the widest load has."""
    return GPU.vector * 8 // tvm.DataType(dtype).bits
