"""Matrix products: packed weights or two activations, any number of rows, any tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler.schedule import tiles
from tvmify.compiler.schedule.elementwise import schedule_block
from tvmify.compiler.schedule.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.schedule.legalizing import accumulator, is_weight, plain
from tvmify.compiler.schedule.loops import (
    extent,
    find,
    fuse,
    keep_in_registers,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.schedule.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.schedule.rule import Rule

#: Names of the template's blocks: the copy of the right-hand side, the tile of sums, its rows
#: numbered through, and the result.
PACK, ANCHOR, ROWS, STORE = "matmul_pack", "matmul_tile", "matmul_rows", "matmul_store"
#: With fewer pieces than this a parallel loop cannot be shared out evenly.
FEW_PIECES = 8


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.matmul``; the packing of a weight is a call of its own, hence can be lifted."""
    left, right = call.args
    out = [int(size) for size in call.ty.shape]
    left_shape = [int(size) for size in left.ty.shape]
    right_shape = [int(size) for size in right.ty.shape]
    dtype = str(call.ty.dtype)
    # Dot products and vectors have no tile to fill: the reduction rule vectorises them better.
    if min(len(left_shape), len(right_shape)) < 2 or out[-1] == 1 or dtype == "bool":
        return plain(builder, call)
    if min(left_shape + right_shape) == 0:
        return plain(builder, call)
    machine = Microarchitecture.current()
    product = Product.of(left_shape, right_shape, out, dtype, machine)
    if len(right_shape) == 2 and is_weight(builder, right):
        right = builder.emit(builder.call_te(product.pack, right, primfunc_name_hint="pack_matmul"))
        template = product.with_packed
    else:
        template = product.with_both
    return builder.call_te(
        template, left, right, primfunc_name_hint="matmul", primfunc_attrs={"op_pattern": 4}
    )


@dataclass(frozen=True)
class Product:
    """One matrix product, cut into tiles.

    Attributes
    ----------
    left, right, out
        Shapes of the operands and of the result.
    batch
        Leading axes with a product each. Empty when all rows of the left-hand side meet the same
        right-hand side and are numbered through.
    rows, columns, depth
        Extents of one such product.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]
    batch: tuple[int, ...]
    rows: int
    columns: int
    depth: int
    tile: tiles.Tile
    dtype: str

    @classmethod
    def of(
        cls,
        left: Sequence[int],
        right: Sequence[int],
        out: Sequence[int],
        dtype: str,
        machine: Microarchitecture,
    ) -> Product:
        """Choose how to number the rows, and the tile."""
        bits = bits_of(accumulator(dtype))
        rows, columns, batch = out[-2], out[-1], tuple(out[:-2])
        if prod(right[:-2]) == 1:
            rows, batch = prod(batch) * rows, ()
        tile = tiles.choose(rows, columns, machine, bits)
        return cls(
            tuple(left), tuple(right), tuple(out), batch, rows, columns, left[-1], tile, dtype
        )

    def pack(self, right: te.Tensor) -> te.Tensor:
        """Lay a matrix out as ``[columns / tile, depth, tile]``, padded with zeros."""
        width = self.tile.columns
        lead = self.right[:-2]

        def element(*index: tirx.Var) -> Expr:
            *outer, tile, k, lane = index
            column = tile * width + lane
            value = right(*outer, k, column).astype(accumulator(self.dtype))
            if self.columns % width == 0:
                return value
            return tirx.if_then_else(
                column < self.columns, value, tirx.const(0, accumulator(self.dtype))
            )

        shape = (*lead, -(-self.columns // width), self.depth, width)
        return te.compute(shape, element, name=PACK)

    def pack_pointwise(self, kernel: te.Tensor) -> te.Tensor:
        """Lay out the weights of a 1×1 convolution, ``[columns, 1, 1, depth]``."""
        turned = (self.depth, self.columns)
        return self.pack(te.compute(turned, lambda i, o: kernel[o, 0, 0, i], name="turned"))

    def with_both(self, left: te.Tensor, right: te.Tensor) -> te.Tensor:
        """The product of two activations; the copy into tiles is a part of the kernel."""
        return self.with_packed(left, self.pack(right))

    def with_packed(self, left: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """The product with a right-hand side in tiles."""
        rows, width = self.tile.rows, self.tile.columns
        dtype = accumulator(self.dtype)
        k = te.reduce_axis((0, self.depth), "k")
        nested = len(self.batch)

        def tile(*index: tirx.Var) -> Expr:
            batch, (row_tile, column_tile, row, lane) = index[:nested], index[nested:]
            row = row_tile * rows + row
            if self.rows % rows:  # rows of the last tile that are not there: the last one again
                row = tirx.min(row, self.rows - 1)
            if nested or len(self.left) == 2:
                outer = _align(batch, self.left[:-2])
            else:
                *outer, row = _unflatten(row, (*self.out[:-2], self.out[-2]))
                outer = _align(outer, self.left[:-2])
            own = _align(batch, self.right[:-2])
            return te.sum(
                left(*outer, row, k).astype(dtype) * packed(*own, column_tile, k, lane), axis=k
            )

        shape = (*self.batch, -(-self.rows // rows), -(-self.columns // width), rows, width)
        sums = te.compute(shape, tile, name=ANCHOR)

        def store(*index: tirx.Var) -> Expr:
            *batch, row, column = index
            at = (row // rows, column // width, row % rows, column % width)
            return sums(*batch, *at).astype(self.dtype)

        if nested or len(self.out) == 2:
            return te.compute(self.out, store, name=STORE)
        # Rows are numbered through: only on one loop does TVM see tiles across leading axes. The
        # rule merges the two stages, with what follows, into the first.
        numbered = te.compute((self.rows, self.columns), store, name=ROWS)
        return te.compute(
            self.out, lambda *i: numbered[_flatten(i[:-1], self.out[:-1]), i[-1]], name=STORE
        )


def _align(index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """Index a tensor of leading axes `shape` that is broadcast to more, or larger, axes."""
    own = list(index)[len(index) - len(shape) :] if shape else []
    if len(own) < len(shape):
        own = [tirx.const(0, "int64")] * (len(shape) - len(own)) + own
    return [tirx.const(0, "int64") if size == 1 else i for i, size in zip(own, shape, strict=True)]


def _flatten(index: Sequence[Expr], shape: Sequence[int]) -> Expr:
    number: Expr = index[0]
    for i, size in zip(index[1:], shape[1:], strict=True):
        number = number * size + i
    return number


def _unflatten(number: Expr, shape: Sequence[int]) -> list[Expr]:
    index = []
    for size in reversed(shape[1:]):
        index.append(number % size)
        number = number // size
    return [number, *reversed(index)]


class Matmul(Rule):
    """Tiles of sums in registers, stored with whatever element-wise chain follows."""

    name = "matmul"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        if find(sch, ANCHOR) is None:
            return None
        inline_producers(sch, ANCHOR, keep=(PACK,))
        store, rest = fuse_epilogue(sch, STORE)
        anchor = sch.get_sblock(ANCHOR)
        block = sch.get(anchor)
        *batch, row_tiles, column_tiles, rows, columns, depth = (
            int(variable.dom.extent) for variable in block.iter_vars
        )
        work = prod(batch) * row_tiles * column_tiles * rows * columns * depth
        if find(sch, ROWS) is not None:
            sch.reverse_compute_inline(store)
            store = sch.get_sblock(ROWS)
        *around, row, column = sch.get_loops(store)
        row_tile, row = sch.split(row, [None, rows])
        column_tile, column = sch.split(column, [None, columns])
        packing = find(sch, PACK)
        size = bits_of(str(block.writes[0].source.dtype)) // 8
        if packing is None:
            left, right = row_tiles * rows * depth * size, column_tiles * columns * depth * size
            by_column = right + left * column_tiles * machine.distance(left)
            by_row = left + right * row_tiles * machine.distance(right)
            nest = [column_tile, row_tile] if by_column <= by_row else [row_tile, column_tile]
            sch.reorder(*around, *nest, row, column)
            outermost = inner = fuse(sch, [*around, *nest])
        else:
            sch.reorder(*around, column_tile, row_tile, row, column)
            outermost, inner = fuse(sch, [*around, column_tile]), row_tile
            if extent(sch, outermost) < FEW_PIECES <= extent(sch, outermost) * row_tiles:
                # Few columns: the copy is a pass of its own, and the rows are shared out too.
                outermost = inner = fuse(sch, [outermost, row_tile])
                schedule_block(sch, packing, machine, work)
                packing = None
        parallel_if_worth(sch, outermost, machine, work)
        sch.compute_at(anchor, inner, preserve_unit_loops=True)
        if packing is not None:
            sch.compute_at(packing, outermost, preserve_unit_loops=True)
            vectorize(sch, sch.get_loops(packing)[-1], machine.lanes(size * 8))
        keep_in_registers(sch, anchor, store, machine.lanes(size * 8))
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch
