"""Loops that tensor expressions cannot express: they raise errors, or write in order. They are not
scheduled, and ``tvmify.asserts`` keeps their assertions when `build` drops those that the executor
has checked. Each is cached by its arguments, since TVM's parser inspects the whole stack, which
takes some 50 ms.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as emit

from tvmify.compiler.kernels.common.emission import anchor, argument
from tvmify.compiler.kernels.common.legalizing import OPAQUE
from tvmify.compiler.sizes import Size, Variables


@functools.cache
def check_positions(length: int | str, extent: int, dtype: str, wrap: bool) -> tirx.PrimFunc:
    """Copy indices, raising eager's ``IndexError`` for one out of range; wrap negative ones.

    Parameters
    ----------
    length
        How many there are, or the symbol for it.
    """
    lowest = -extent if wrap else 0
    # int64, as Relax has it: buffers must agree to be merged
    is_known = isinstance(length, int)
    count: Any = tirx.const(length, "int64") if is_known else tirx.Var(length, "int64")
    shape = (count,)
    attributes = OPAQUE | {"tvmify.asserts": True}

    @T.prim_func(private=True, s_tir=True)
    def check(index: T.Buffer(shape, dtype), result: T.Buffer(shape, dtype)):
        T.func_attr(attributes)
        with T.sblock("root"), T.sblock("bounds check"):
            T.reads(index[0:count])
            T.writes(result[0:count])
            for at in range(count):
                assert T.And(index[at] >= lowest, index[at] < extent), (
                    "IndexError",
                    ["index out of range in self"],
                )
                result[at] = T.Select(index[at] < 0, index[at] + extent, index[at])

    return check


def check_positions_on_axis(
    length: int | str, shape: Sequence[Any], axis: int, dtypes: tuple[str, str], wrap: bool
) -> tirx.PrimFunc:
    """As `check_positions`, for an axis of symbolic size of a tensor, which is the second argument.

    Parameters
    ----------
    shape
        The shape of that tensor, with variables for symbolic sizes.
    dtypes
        The dtypes of the indices and of the tensor.
    """
    dtype, other = dtypes
    is_known = isinstance(length, int)
    count: Any = tirx.const(length, "int64") if is_known else tirx.Var(length, "int64")
    flat, sizes = (count,), tuple(shape)
    extent = sizes[axis]
    lowest = -extent if wrap else 0
    attributes = OPAQUE | {"tvmify.asserts": True}

    @T.prim_func(private=True, s_tir=True)
    def check(
        index: T.Buffer(flat, dtype), whole: T.Buffer(sizes, other), result: T.Buffer(flat, dtype)
    ):
        T.func_attr(attributes)
        with T.sblock("root"), T.sblock("bounds check"):
            T.reads(index[0:count])
            T.writes(result[0:count])
            for at in range(count):
                assert T.And(index[at] >= lowest, index[at] < extent), (
                    "IndexError",
                    ["index out of range in self"],
                )
                result[at] = T.Select(index[at] < 0, index[at] + extent, index[at])

    return check


@functools.cache
def write_runs(
    size: int, count: int, inner: int, dtype: str, offset_dtype: str, add: bool
) -> tirx.PrimFunc:
    """Copy `size` elements, then write `count` runs of `inner` values; the last write wins.

    With `add` the values are added instead.
    """
    keep = 1 if add else 0

    @T.prim_func(private=True, s_tir=True)
    def write(
        source: T.Buffer((size,), dtype),
        offsets: T.Buffer((count,), offset_dtype),
        values: T.Buffer((count * inner,), dtype),
        result: T.Buffer((size,), dtype),
    ):
        T.func_attr(OPAQUE)
        with T.sblock("root"), T.sblock("scatter"):
            T.reads(source[0:size], offsets[0:count], values[0 : count * inner])
            T.writes(result[0:size])
            for i in range(size):
                result[i] = source[i]
            for i, j in T.grid(count, inner):
                if keep == 1:
                    result[offsets[i] * inner + j] = (
                        result[offsets[i] * inner + j] + values[i * inner + j]
                    )
                else:
                    result[offsets[i] * inner + j] = values[i * inner + j]

    return write


def write_rows(
    shape: Sequence[Size],
    axis: int,
    count: Size,
    dtypes: tuple[str, str],
    *,
    in_place: bool,
) -> tirx.PrimFunc:
    """Write values to some indices of an axis; of equal indices, the last one wins.

    The function takes a tensor, the indices, the values, and the result; or, in place, a tensor
    that is the result, the indices and the values.

    Parameters
    ----------
    shape
        Of the tensor.
    count
        How many indices there are.
    dtypes
        Those of the tensor and of the indices.
    """
    dtype, index_dtype = dtypes
    variables = Variables()
    shape, count = variables.of(shape), variables(count)
    written = (*shape[:axis], count, *shape[axis + 1 :])
    with IRBuilder() as builder, emit.prim_func(is_private=True, s_tir=True):
        emit.func_attr(OPAQUE)
        source = None if in_place else argument("source", shape, dtype)
        result = argument("result", shape, dtype) if in_place else None
        index = argument("index", (count,), index_dtype)
        values = argument("values", written, dtype)
        if result is None:
            result = argument("result", shape, dtype)
        read = [index, values] if source is None else [source, index, values]
        with anchor("scatter", read, result):
            if source is not None:
                with emit.grid(*shape) as at:
                    emit.buffer_store(result, source[tuple(at)], at)
            with emit.grid(*written) as at:
                place = [*at[:axis], index[at[axis]], *at[axis + 1 :]]
                emit.buffer_store(result, values[tuple(at)], place)
    return builder.get()  # type: ignore[return-value]
