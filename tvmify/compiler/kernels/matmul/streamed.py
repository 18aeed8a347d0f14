"""Products of few rows with an activation where it lies, ``x @ y``: one row, or a step of decoding.

A row of y lies along memory, and is multiplied by one number of each row of x. The loops::

    for each block of columns:                      divided among the cores
        for each chunk of the reduction:            its rows of y are read side by side
            for each tile of columns:               copied to L1 for several tiles of rows
                for each tile of rows:
                    tile = chunk of x × chunk of y  in registers
                    sums += tile                    in L1
        epilogue(sums)

Packing would write all of y, which pays only for many rows. A panel as wide as a tile would not be
read along memory: each of its rows is a cache line or two, and far from the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import relax, tirx
from tvm.ir import Call, Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.costs import MATMUL, TILE
from tvmify.compiler.kernels.common.emission import (
    anchor,
    argument,
    block,
    lanewise,
    registers,
    scratch,
    tasks,
    vectors,
)
from tvmify.compiler.kernels.common.legalizing import FUSIBLE, call_kernel
from tvmify.compiler.kernels.common.sums import longest_sum, split_evenly
from tvmify.compiler.kernels.matmul.rows import unflatten
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

#: Of the rule, and of its anchor.
NAME = "streamed product"
_Index = Sequence[Expr | int]
_Element = Callable[[Expr, Expr], Expr]


def legalize(builder: relax.BlockBuilder, call: Call, machine: Microarchitecture) -> Expr | None:
    """Lower ``relax.matmul`` of two activations; None if packing the right one is faster."""
    left, right = call.args
    dtype = str(call.ty.dtype)
    own = sizes.Variables()
    product = Streamed.of(*(own.of(x.ty.shape) for x in (left, right)), dtype, machine)
    if product is None:
        return None
    result = relax.TensorType(call.ty.shape, dtype)
    return call_kernel(
        builder, product.kernel(), [left, right], own.meaning(), result, "matmul_streamed"
    )


@dataclass(frozen=True)
class Streamed:
    """One product, or several, of a few rows.

    Attributes
    ----------
    left, right
        Shapes of the operands.
    shared
        Whether all rows are multiplied by the same matrix. Otherwise each matrix of `left` is by
        that of `right` at its place.
    rows
        How many rows are multiplied by a matrix.
    dtype
        Of both, and of the result.
    machine
        What it is for.
    chunk
        Elements of the reduction that are added up in registers.
    """

    left: tuple[Size, ...]
    right: tuple[Size, ...]
    shared: bool
    rows: int
    dtype: str
    machine: Microarchitecture
    chunk: int

    @classmethod
    def of(
        cls,
        left: tuple[Size, ...],
        right: tuple[Size, ...],
        dtype: str,
        machine: Microarchitecture,
    ) -> Streamed | None:
        """Return a product; None if it has too many rows, or is not one of those."""
        shared = all(map(sizes.is_one, right[:-2]))
        if len(left) < len(right) or not (shared or sizes.same_shape(left[:-2], right[:-2])):
            return None
        rows = sizes.product(left[:-1] if shared else left[-2:-1])
        if dtype not in ("float32", "float64") or not sizes.is_static(rows, right[-1]):
            return None
        longest = longest_sum(sizes.hint(left[-1]))
        chunk = min(MATMUL.chunk, longest)
        if int(right[-1]) < machine.lanes(bits_of(dtype)) or int(rows) > MATMUL.streamed_rows:
            return None
        if sizes.hint(left[-1]) > chunk * longest:
            return None
        return cls(left, right, shared, int(rows), dtype, machine, chunk)

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.machine.lanes(bits_of(self.dtype))

    @property
    def width(self) -> int:
        """The columns of a block, whose sums fill half of L1: whole vectors, or all columns."""
        columns = int(self.right[-1])
        fitting = self.machine.l1_bytes * 4 // (self.rows * bits_of(self.dtype))
        width = split_evenly(columns, min(fitting, MATMUL.streamed_columns))
        return width if width == columns else -(-width // self.lanes) * self.lanes

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of a tile, with enough sums to hide the latency of additions."""
        tall = split_evenly(self.rows, TILE.latency)
        return tall, max(TILE.latency * self.machine.units // tall, 1) * self.lanes

    def kernel(self) -> tirx.PrimFunc:
        """Return the function of both operands and their product."""
        batch = () if self.shared else self.left[:-2]
        depth, columns = self.right[-2:]
        width = self.width
        blocks = -(-int(columns) // width)
        count = sizes.product(batch)
        elements = sizes.hint(count) * sizes.hint(depth) * int(columns)
        moved = elements * bits_of(self.dtype) // 8
        shapes = self.left, self.right, (*self.left[:-1], columns)
        with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
            T.func_attr(FUSIBLE)
            x, y, product = (
                argument(role, shape, self.dtype)
                for role, shape in zip(("x", "y", "product"), shapes, strict=True)
            )
            with (
                anchor(NAME, [x, y], product),
                tasks(count * blocks, elements * self.rows, moved, self.machine) as task,
                block("task"),
            ):
                # The last block is moved back to fit, and computes some columns again.
                first = tirx.min(task % blocks * width, columns - width)
                outer = unflatten(task // blocks, batch) if batch else []
                sums = scratch((self.rows, width), self.dtype)
                self._each(lambda row, at: T.buffer_store(sums, self._zero, [row, at]))
                with T.serial(sizes.ceil_div(depth, self.chunk)) as number:
                    start = number * self.chunk
                    self._add(
                        lambda row, k: x[tuple(self._left(outer, row, start + k))],
                        lambda k, at: y[tuple(self._right(outer, start + k, first + at))],
                        sums,
                        self._steps(depth, start),
                    )
                self._each(
                    lambda row, at: T.buffer_store(
                        product, sums[row, at], self._left(outer, row, first + at)
                    )
                )
        return builder.get()

    @property
    def _zero(self) -> Expr:
        return tirx.const(0, self.dtype)

    def _left(self, outer: _Index, row: Expr, last: Expr) -> list[Expr]:
        """Return the place of an element of a row of the left operand, or of the result."""
        if self.shared:
            return [*unflatten(row, self.left[:-1]), last]
        return [*outer, row, last]

    def _right(self, outer: _Index, k: Expr, column: Expr) -> list[Expr]:
        """Return the place of an element of the right operand."""
        zero = tirx.const(0, "int64")
        return [*([zero] * len(self.right[:-2]) if self.shared else outer), k, column]

    def _steps(self, depth: Size, start: Expr) -> Size:
        """Return how many elements of the reduction a chunk has: the last one may have fewer."""
        if isinstance(depth, int):
            if depth <= self.chunk:
                return depth
            if depth % self.chunk == 0:
                return self.chunk
        return tirx.min(depth - start, self.chunk)

    def _each(self, body: Callable[[Expr, Expr], None]) -> None:
        """Emit the body for each sum of a block, in vectors."""
        whole = self.width // self.lanes
        with T.serial(self.rows) as row:
            if whole:
                with T.serial(whole) as number, T.vectorized(self.lanes) as lane:
                    body(row, number * self.lanes + lane)
            start = whole * self.lanes
            rest = vectors(self.width - start, self.lanes)
            lanewise([(start + at, n) for at, n in rest], lambda at: body(row, at))

    def _add(
        self,
        left: _Element,
        right: _Element,
        sums: tirx.Buffer,
        steps: Size,
    ) -> None:
        """Emit the product of a chunk, tile by tile.

        Parameters
        ----------
        left, right
            Return the element of a row of x, and of a column of y, at a step of the chunk.
        """

        def tile(row: Expr, column: Expr, tall: int, wide: int, right: _Element) -> None:
            cuts = vectors(wide, self.lanes)
            with block("tile"):
                own = registers((tall, wide), self.dtype)

                def each(body: Callable[[int, Expr], None]) -> None:
                    for r in range(tall):
                        lanewise(cuts, partial(body, r))

                def step(k: Expr) -> None:
                    def multiply(r: int, at: Expr) -> None:
                        term = left(row + r, k) * right(k, at)
                        T.buffer_store(own, own[r, at] + term, [r, at])

                    each(multiply)

                each(lambda r, at: T.buffer_store(own, self._zero, [r, at]))
                # LLVM would compute the sums of a straight chunk one after the other, and spill.
                unrolled = TILE.most_steps
                with T.serial(sizes.simplified(tirx.floordiv(steps, unrolled))) as several:
                    for i in range(unrolled):
                        step(several * unrolled + i)
                with T.serial(sizes.simplified(tirx.floormod(steps, unrolled))) as last:
                    step(tirx.floordiv(steps, unrolled) * unrolled + last)

                def add(r: int, at: Expr) -> None:
                    place = [row + r, column + at]
                    T.buffer_store(sums, sums[tuple(place)] + own[r, at], place)

                each(add)

        tall, wide = self.tile

        def rows_of(column: Expr, wide: int) -> None:
            def element(k: Expr, at: Expr) -> Expr:
                return right(k, column + at)

            def rows(element: _Element) -> None:
                _tiles(self.rows, tall, lambda row, size: tile(row, column, size, wide, element))

            if self.rows <= 2 * tall:
                rows(element)
                return
            # Rows of y are often a multiple of 4096 bytes apart, and evict each other from L1.
            with block("columns"):
                copy = scratch((self.chunk, wide), self.dtype)
                with T.serial(steps) as k:
                    lanewise(
                        vectors(wide, self.lanes),
                        lambda at: T.buffer_store(copy, element(k, at), [k, at]),
                    )
                rows(lambda k, at: copy[k, at])

        _tiles(self.width, wide, rows_of)


def _tiles(length: int, size: int, body: Callable[[Expr, int], None]) -> None:
    """Emit the body for each whole tile, given its start and size, and for the rest."""
    whole, rest = divmod(length, size)
    if whole:
        with T.serial(whole) as number:
            body(number * size, size)
    if rest:
        body(tirx.const(whole * size, "int64"), rest)
