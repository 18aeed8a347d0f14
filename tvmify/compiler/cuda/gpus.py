"""Numbers of the GPUs that kernels are written for, and the dtypes that these compute in."""

from __future__ import annotations

import tvm

#: The widest load or store of a thread, in bytes.
_VECTOR_BYTES = 16
#: Threads of a warp.
WARP = 32
#: Multiprocessors of an H100 and an H200: a kernel with fewer blocks leaves some of them idle.
MULTIPROCESSORS = 132
#: Threads that one multiprocessor runs at once.
RESIDENT_THREADS = 2048

FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32"})
#: Dtypes that TVM has vectors of; vectors of bool have another layout in memory than PyTorch's.
VECTOR_DTYPES = FLOAT_DTYPES | {"int32"}


def vector_lanes(dtype: str) -> int:
    """Return how many elements the widest load has."""
    return _VECTOR_BYTES * 8 // tvm.DataType(dtype).bits
