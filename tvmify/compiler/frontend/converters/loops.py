"""Loops that tensor expressions cannot express: they raise errors, or write in order. They are not
scheduled, and `ASSERTS` keeps their assertions when `build` drops those that the executor has
checked.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.attributes import ASSERTS, READS_ONCE
from tvmify.compiler.kernels.common.emission import anchor, argument, tasks
from tvmify.compiler.kernels.common.legalizing import OPAQUE
from tvmify.compiler.kernels.elementwise.keep_nan import maximum, minimum
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size, Variables, is_static


def _sum(before: Expr, value: Expr) -> Expr:
    return tirx.any(before, value) if str(value.ty.dtype) == "bool" else before + value


#: The number of the operand with the values, and the most tasks of `write_runs`.
_VALUES, _MOST_TASKS = 2, 8
_JOINS = {"sum": _sum, "prod": operator.mul, "amax": maximum, "amin": minimum}


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
    rows: Size, count: Size, inner: Size, dtypes: tuple[str, str], join: str | None
) -> tirx.PrimFunc:
    """Copy `rows` runs of `inner` elements, then write `count` of them, in order.

    Parameters
    ----------
    dtypes
        Those of the elements and of the places of runs.
    join
        How a value is joined with what is there, by the names of ``torch.scatter_reduce``; None to
        replace it.
    """
    dtype, place_dtype = dtypes
    machine = Microarchitecture.current()
    lanes = machine.lanes(bits_of(dtype))
    width = _width(inner, lanes)
    variables = Variables()
    rows, count, inner = variables(rows), variables(count), variables(inner)
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        # Without threads, values are better computed by a kernel that has some.
        T.func_attr(OPAQUE | ({} if width is None else {READS_ONCE: [_VALUES]}))
        source = argument("source", (rows, inner), dtype)
        places = argument("places", (count,), place_dtype)
        values = argument("values", (count, inner), dtype)
        result = argument("result", (rows, inner), dtype)
        work = sizes.hint(count * inner)
        with (
            anchor("scatter", [source, places, values], result),
            tasks(
                inner // width if width else 1, work, work * bits_of(dtype) // 8, machine
            ) as task,
        ):
            columns = T.serial(inner) if width is None else _vectors(task, width, lanes)
            with T.serial(rows) as i, columns as j:
                T.buffer_store(result, source[i, j], [i, j])
            columns = T.serial(inner) if width is None else _vectors(task, width, lanes)
            with T.serial(count) as i, columns as j:
                value = values[i, j]
                if join is not None:
                    value = _JOINS[join](result[places[i], j], value)
                T.buffer_store(result, value, [places[i], j])
    return builder.get()  # type: ignore[return-value]


def _width(inner: Size, lanes: int) -> int | None:
    """Return how many columns a task writes, or None for one task: two registers or more, since
    each task reads all places.
    """
    if not is_static(inner):
        return None
    widths = [inner // tasks for tasks in range(2, _MOST_TASKS + 1) if inner % tasks == 0]
    return next((width for width in reversed(widths) if width % (2 * lanes) == 0), None)


@contextmanager
def _vectors(task: Expr, width: int, lanes: int) -> Iterator[Expr]:
    """Loop over the columns of a task: LLVM does not know that tensors of a task are different."""
    with T.serial(width // lanes) as vector, T.vectorized(lanes) as lane:
        yield task * width + vector * lanes + lane


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
