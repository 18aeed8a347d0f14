"""Loops that tensor expressions cannot say: they raise errors, or write in order.

They are scheduled as they stand, and ``tvmify.asserts`` keeps their assertions when `build` drops
those that repeat what the executor has checked. Each is made once for its arguments: to read one,
TVM's parser inspects the whole stack, for some 50 ms.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

import functools
from math import gcd

from tvm import tirx
from tvm.script import tirx as T

from tvmify.compiler.schedule.legalizing import scheduled_as
from tvmify.compiler.schedule.plans import split_evenly


@functools.cache
def check_positions(count: int, extent: int, dtype: str, wrap: bool) -> tirx.PrimFunc:
    """Copy positions, raising eager's ``IndexError`` for one outside; wrap negative ones."""
    lowest = -extent if wrap else 0
    shape = (tirx.const(count, "int64"),)  # as Relax has it: buffers must agree to be merged
    attributes = scheduled_as("bounds check") | {"tvmify.asserts": True}

    @T.prim_func(private=True, s_tir=True)
    def check(index: T.Buffer(shape, dtype), result: T.Buffer(shape, dtype)):
        T.func_attr(attributes)
        for i in range(count):
            with T.sblock("check"):
                at = T.axis.spatial(count, i)
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
    """Copy `size` elements, then write `count` runs of `inner` values, the last one winning.

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
        T.func_attr(scheduled_as("scatter"))
        with T.sblock("write"):
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


@functools.cache
def accumulate(
    outer: int, count: int, inner: int, dtype: str, *, product: bool, fork: bool
) -> tirx.PrimFunc:
    """Return running sums, or products, along the middle one of three axes.

    They are carried in 64 bits, as eager's are: in 32, a million of them lose four digits. Each
    waits for the one before, so several rows, or columns, take turns.
    """
    size = outer * count * inner
    multiply = 1 if product else 0
    rows = gcd(outer, 8) if inner == 1 else 1
    columns = split_evenly(inner, 64)
    across = -(-inner // columns)
    carried = "float64" if dtype.startswith("float") else dtype
    shared = T.parallel if fork else T.serial

    @T.prim_func(private=True, s_tir=True)
    def run(source: T.Buffer((size,), dtype), result: T.Buffer((size,), dtype)):
        T.func_attr(scheduled_as("cumprod" if product else "cumsum"))
        for block in shared(outer // rows * across):
            with T.sblock("accumulate"):
                T.reads(source[0:size])
                T.writes(result[0:size])
                carry = T.alloc_buffer((rows, columns), carried, scope="local")
                for r in T.unroll(rows):
                    for j in T.serial(columns):
                        carry[r, j] = multiply
                for k in T.serial(count):
                    for r in T.unroll(rows):
                        # The last columns may be fewer.
                        for j in T.serial(T.min(columns, inner - block % across * columns)):
                            at: T.let = (
                                ((block // across * rows + r) * count + k) * inner
                                + block % across * columns
                                + j
                            )
                            if multiply == 1:
                                carry[r, j] = carry[r, j] * T.Cast(carried, source[at])
                            else:
                                carry[r, j] = carry[r, j] + T.Cast(carried, source[at])
                            result[at] = T.Cast(dtype, carry[r, j])

    return run
