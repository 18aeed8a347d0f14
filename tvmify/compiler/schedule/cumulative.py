"""Running sums and products: loops that carry each result to the next.

Outermost first: rows in eights, or columns in blocks of 64, in parallel; along the axis; the rows
or columns of a task. Each result waits for the one before, so that those of several rows take
turns; along columns they are vectors.
"""

from __future__ import annotations

import functools
from math import gcd, prod

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler.schedule.emission import anchor, argument, block, registers, tasks
from tvmify.compiler.schedule.legalizing import FUSIBLE
from tvmify.compiler.schedule.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.schedule.plans import split_evenly

#: Of the rules, and of their anchors.
SUM, PRODUCT = "cumsum", "cumprod"
#: Rows, and columns, of a task.
_ROWS, _COLUMNS = 8, 64


@functools.cache
def kernel(
    shape: tuple[int, ...], axis: int, dtype: str, name: str, machine: Microarchitecture
) -> tirx.PrimFunc:
    """Return the function of a tensor and its running sums, or products, along an axis.

    They are carried in 64 bits, as eager's are: in 32, a million of them lose four digits.

    Parameters
    ----------
    shape
        With at most one axis before, and one behind.
    name
        `SUM` or `PRODUCT`.
    """
    outer, count, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    rows = gcd(outer, _ROWS) if inner == 1 else 1
    columns = split_evenly(inner, _COLUMNS)
    across = -(-inner // columns)
    carried = "float64" if dtype.startswith("float") else dtype
    # Along memory there are no vectors: an element takes as long as three of them.
    work = prod(shape) if inner > 1 else prod(shape) * 3 * machine.lanes()
    moved = 2 * prod(shape) * bits_of(dtype) // 8

    def place(row: Expr, k: Expr, column: Expr) -> list[Expr]:
        return [row] * (axis > 0) + [k] + [column] * (axis < len(shape) - 1)

    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(FUSIBLE)
        source, result = (argument(name, shape, dtype) for name in ("source", "result"))
        with (
            anchor(name, [source], result),
            tasks(outer // rows * across, work, moved, machine) as task,
            block("task"),
        ):
            first_row, first_column = task // across * rows, task % across * columns
            # The last columns may be fewer.
            width = tirx.min(columns, inner - first_column) if inner % columns else columns
            carry = registers((rows, columns), carried)
            with T.unroll(rows) as row, T.serial(columns) as column:
                T.buffer_store(carry, tirx.const(name == PRODUCT, carried), [row, column])
            with T.serial(count) as k, T.unroll(rows) as row, T.serial(width) as column:
                at = place(first_row + row, k, first_column + column)
                value = source[tuple(at)].astype(carried)
                before = carry[row, column]
                value = before * value if name == PRODUCT else before + value
                T.buffer_store(carry, value, [row, column])
                T.buffer_store(result, carry[row, column].astype(dtype), at)
    return builder.get()
