"""Cumulative sums and products: loops that carry each result to the next. The loops, outermost
first: eight rows, or blocks of up to 64 columns, in parallel; along the axis; the rows or columns
of a task. Each result depends on the one before, so several rows are interleaved; columns are
vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler.costs import NEST
from tvmify.compiler.kernels.common.emission import (
    anchor,
    argument,
    block,
    lanewise,
    registers,
    tasks,
    vectors,
)
from tvmify.compiler.kernels.common.legalizing import FUSIBLE, OPAQUE
from tvmify.compiler.kernels.common.sums import split_evenly
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import (
    Size,
    Variables,
    bounds,
    ceil_div,
    hint,
    is_one,
    is_static,
    product,
)

#: Of the rules, and of their anchors.
SUM, PRODUCT = "cumsum", "cumprod"


def kernel(
    shape: Sequence[Size], axis: int, dtype: str, name: str, machine: Microarchitecture
) -> tirx.PrimFunc:
    """Return the function of a tensor and its running sums, or products, along an axis.

    They are carried in 64 bits, as in eager: in 32 bits, a million of them lose four digits.

    Parameters
    ----------
    shape
        With at most one axis before, and one behind.
    name
        `SUM` or `PRODUCT`.
    """
    shape = Variables().of(shape)
    outer, count, inner = product(shape[:axis]), shape[axis], product(shape[axis + 1 :])
    lanes = machine.lanes(bits_of(dtype))
    rows = _rows(outer) if is_one(inner) else 1
    columns = _columns(inner, lanes)
    down, across = ceil_div(outer, rows), ceil_div(inner, columns)
    cuts = vectors(columns, lanes)
    carried = "float64" if dtype.startswith("float") else dtype
    elements = hint(product(shape))
    work = elements * NEST.carried_element * lanes if is_one(inner) else elements
    moved = 2 * elements * bits_of(dtype) // 8

    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        # Along memory, an epilogue would not be vectorized, either.
        T.func_attr(OPAQUE if is_one(inner) else FUSIBLE)
        source, result = (argument(role, shape, dtype) for role in ("source", "result"))
        with (
            anchor(name, [source], result),
            tasks(down * across, work, moved, machine) as task,
            block("task"),
        ):
            # The last task is moved back to fit, so that some rows or columns are computed twice.
            first_row = tirx.min(task // across * rows, outer - rows)
            first_column = tirx.min(task % across * columns, inner - columns)
            carry = registers((rows, columns), carried)

            def begin(row: Expr, column: Expr) -> None:
                T.buffer_store(carry, tirx.const(name == PRODUCT, carried), [row, column])

            def go_on(row: Expr, column: Expr, k: Expr) -> None:
                before = [first_row + row] if axis > 0 else []
                after = [first_column + column] if axis < len(shape) - 1 else []
                place = [*before, k, *after]
                value, so_far = source[tuple(place)].astype(carried), carry[row, column]
                value = so_far * value if name == PRODUCT else so_far + value
                T.buffer_store(carry, value, [row, column])
                T.buffer_store(result, carry[row, column].astype(dtype), place)

            with T.unroll(rows) as row:
                lanewise(cuts, lambda column: begin(row, column))
            with T.serial(count) as k, T.unroll(rows) as row:
                lanewise(cuts, lambda column: go_on(row, column, k))
    return builder.get()


def _rows(count: Size) -> int:
    most = NEST.carried_rows
    return gcd(int(count), most) if is_static(count) else min(most, bounds(count)[0])


def _columns(count: Size, lanes: int) -> int:
    if not is_static(count):
        return min(NEST.carried_columns, bounds(count)[0])
    columns = split_evenly(int(count), NEST.carried_columns)
    # Whole vectors, or halves.
    return columns if columns == count else -(-columns * 2 // lanes) * lanes // 2
