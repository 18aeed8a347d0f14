"""Loops that tensor expressions cannot express: they raise errors, or write in order. They are not
scheduled, and `ASSERTS` keeps their assertions when `build` drops those that the executor has
checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler.kernels.common.attributes import ASSERTS
from tvmify.compiler.kernels.common.emission import anchor, argument
from tvmify.compiler.kernels.common.legalizing import OPAQUE
from tvmify.compiler.sizes import Size, Variables, is_static


def check_positions(
    count: Size, shape: Sequence[Size], axis: int, dtypes: tuple[str, str], *, wrap: bool
) -> tirx.PrimFunc:
    """Copy indices, raising eager's ``IndexError`` for one out of range; wrap negative ones.

    The function takes the indices, the indexed tensor if the size of its axis is symbolic, and the
    result.

    Parameters
    ----------
    count
        How many indices there are.
    shape, axis
        The shape of the indexed tensor, and the axis.
    dtypes
        Those of the indices and of the tensor.
    """
    dtype, indexed_dtype = dtypes
    variables = Variables()
    shape, count = variables.of(shape), variables(count)
    size = shape[axis]
    extent = int(size) if is_static(size) else size.astype(dtype)
    lowest = -extent if wrap else 0
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(OPAQUE | {ASSERTS: True})
        index = argument("index", (count,), dtype)
        if not is_static(size):
            argument("indexed", shape, indexed_dtype)  # for its size
        result = argument("result", (count,), dtype)
        (length,) = index.shape
        with T.sblock("root"), T.sblock("bounds check"):
            T.reads(index[0:length])
            T.writes(result[0:length])
            with T.serial(length) as at:
                inside = tirx.all(index[at] >= lowest, index[at] < extent)
                with T.Assert(inside, "index out of range in self", "IndexError"):
                    pass
                wrapped = tirx.Select(index[at] < 0, index[at] + extent, index[at])
                T.buffer_store(result, wrapped, [at])
    return builder.get()  # type: ignore[return-value]


def write_runs(
    rows: Size, count: Size, inner: Size, dtypes: tuple[str, str], *, add: bool
) -> tirx.PrimFunc:
    """Copy `rows` runs of `inner` elements, then write `count` of them; the last write wins.

    With `add` the values are added instead.

    Parameters
    ----------
    dtypes
        Those of the elements and of the places of runs.
    """
    dtype, place_dtype = dtypes
    variables = Variables()
    rows, count, inner = variables(rows), variables(count), variables(inner)
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(OPAQUE)
        source = argument("source", (rows, inner), dtype)
        places = argument("places", (count,), place_dtype)
        values = argument("values", (count, inner), dtype)
        result = argument("result", (rows, inner), dtype)
        with anchor("scatter", [source, places, values], result):
            with T.grid(rows, inner) as at:
                T.buffer_store(result, source[tuple(at)], at)
            with T.grid(count, inner) as (i, j):
                place = [places[i], j]
                value = values[i, j]
                if add:
                    before = result[tuple(place)]
                    value = tirx.any(before, value) if dtype == "bool" else before + value
                T.buffer_store(result, value, place)
    return builder.get()  # type: ignore[return-value]


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
        The shape of the tensor.
    count
        How many indices there are.
    dtypes
        Those of the tensor and of the indices.
    """
    dtype, index_dtype = dtypes
    variables = Variables()
    shape, count = variables.of(shape), variables(count)
    written = (*shape[:axis], count, *shape[axis + 1 :])
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(OPAQUE)
        source = None if in_place else argument("source", shape, dtype)
        result = argument("result", shape, dtype) if in_place else None
        index = argument("index", (count,), index_dtype)
        values = argument("values", written, dtype)
        if result is None:
            result = argument("result", shape, dtype)
        read = [index, values] if source is None else [source, index, values]
        with anchor("scatter", read, result):
            if source is not None:
                with _grid(shape) as at:
                    T.buffer_store(result, source[tuple(at)], at)
            with _grid(written) as at:
                place = [*at[:axis], index[at[axis]], *at[axis + 1 :]]
                T.buffer_store(result, values[tuple(at)], place)
    return builder.get()  # type: ignore[return-value]


def write_region(shape: Sequence[Size], written: Sequence[Size], dtype: str) -> tirx.PrimFunc:
    """Write values to a part of a tensor, in its own memory.

    The function takes the tensor, where the part begins along each axis (int64), and the values.

    Parameters
    ----------
    shape
        The shape of the tensor.
    written
        That of the values.
    """
    variables = Variables()
    shape, written = variables.of(shape), variables.of(written)
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(OPAQUE)
        result = argument("result", shape, dtype)
        starts = argument("starts", (len(shape),), "int64")
        values = argument("values", written, dtype)
        with anchor("scatter", [starts, values], result), _grid(written) as at:
            place = [starts[axis] + i for axis, i in enumerate(at)]
            T.buffer_store(result, values[tuple(at)], place)
    return builder.get()  # type: ignore[return-value]


@contextmanager
def _grid(extents: Sequence[Any]) -> Iterator[list[Any]]:
    """Loop over each axis, also over a single one, of which `T.grid` gives no list."""
    with T.grid(*extents) as at:
        yield list(at) if len(extents) > 1 else [at]
