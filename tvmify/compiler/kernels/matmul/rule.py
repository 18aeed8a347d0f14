"""Matrix products with packed weights or of two activations, with any number of rows and columns.

The loops, if panels come first (see `plan.Plan.rows_first`)::

    for each panel of columns:                  these two loops are divided
        for each block of rows:                 among the cores
            for each block of the reduction:    its part of the panel stays in L1
                for each tile of rows:
                    for each step of the block: the next block is prefetched
                        tile += row × lanes     in registers
                    sums += tile                in L2
            epilogue(sums)

With a single block of the reduction there are no sums in L2: each tile is stored directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm import relax, s_tir
from tvm.ir import Call, Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.costs import MATMUL
from tvmify.compiler.kernels.common.attributes import DEPTH, ROWS_FIRST
from tvmify.compiler.kernels.common.axes import LANE, ROW, Axes, own_loops
from tvmify.compiler.kernels.common.legalizing import is_weight, plain
from tvmify.compiler.kernels.common.loops import (
    element_count,
    extent,
    find,
    fuse,
    is_symbolic,
    iterations,
    keep_in_registers,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.common.prefetch import VaryingRows, fetch_ahead
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.short_tiles import allow_short_tiles
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.kernels.matmul import compact, dots, pairs, plan, streamed, vectors
from tvmify.compiler.kernels.matmul.rows import stacked
from tvmify.compiler.kernels.matmul.template import (
    ANCHOR,
    BLOCK,
    GATED,
    PACK,
    PAD,
    PARTIAL,
    ROWS,
    STORE,
    Product,
)
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import Size


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.matmul``; weights are packed in a separate call, which can be lifted."""
    left, right = call.args
    out, left_shape, right_shape = (sizes.sizes_of(x.ty.shape) for x in (call, left, right))
    dtype = str(call.ty.dtype)
    # Dot products and matrix-vector products fill no tile; the reduction rule vectorizes them.
    if min(len(left_shape), len(right_shape)) < 2:
        return vectors.legalize(builder, call)
    if sizes.is_one(out[-1]) or dtype == "bool":
        return plain(builder, call)
    if min(sizes.hints(left_shape + right_shape)) == 0:
        return plain(builder, call)
    machine = Microarchitecture.current()
    packed = is_weight(builder, right)
    for unpacked in () if packed else (dots.legalize, streamed.legalize):
        if (kernel := unpacked(builder, call, machine)) is not None:
            return kernel
    several = stacked(right_shape, out)
    rows = element_count(out[axis] for axis in range(len(out) - 1) if axis not in several)
    narrow = pairs.rows_of(builder, left, [right], rows, machine) if packed else None
    paired = narrow is not None
    is_compact = (
        packed
        and not paired
        and sizes.is_static(*out)
        and compact.applies(builder, rows, right_shape, dtype, machine)
    )
    product = Product.of(
        left_shape,
        right_shape,
        out,
        dtype,
        machine,
        packed=packed,
        is_compact=is_compact,
        paired=paired,
    )
    template, weights = product.with_both, [right]
    if packed:
        template = product.with_packed
        weights = [
            builder.emit(builder.call_te(product.pack, right, primfunc_name_hint="pack_matmul"))
        ]
    if is_compact:
        weights = compact.pack(builder, *weights)
    return builder.call_te(
        template,
        left if narrow is None else narrow,
        *weights,
        primfunc_name_hint="matmul",
        primfunc_attrs=Pattern.FUSIBLE.attributes,
    )


@dataclass(frozen=True)
class Cut:
    """How the template has cut a product, read from its blocks.

    Attributes
    ----------
    row_tiles, column_tiles
        How many tiles there are along rows and columns.
    rows, columns
        The rows and columns of a tile.
    block, rows_first
        Those of `plan.Plan`.
    work
        Multiply-adds, of all products if there are several.
    bits
        Bits of a sum.
    """

    row_tiles: int
    column_tiles: int
    rows: int
    columns: int
    block: int
    rows_first: bool
    work: float
    bits: int

    @classmethod
    def of(cls, sch: s_tir.Schedule, anchor: SBlockRV, summed: SBlockRV) -> Cut:
        """Read the blocks of a function: the one with the plan, and the one that multiplies."""
        planned = sch.get(anchor)
        return cls(
            *Axes.of(planned).extents("row_tile", "column_tile", ROW, LANE),
            int(planned.annotations[BLOCK]),
            bool(planned.annotations[ROWS_FIRST]),
            float(iterations(sch, summed)),
            output_bits(sch, anchor),
        )

    @property
    def weights(self) -> float:
        """Bytes of all right-hand sides."""
        return self.work / (self.row_tiles * self.rows) * self.bits / 8

    def varying(self, count: Size) -> VaryingRows | None:
        """Return what prefetches need to know of this number of rows, if it is a symbol."""
        return None if sizes.is_static(count) else VaryingRows(count, plan.fewest(self.block))

    def is_narrow(self, products: int = 1) -> bool:
        """Whether each row is multiplied by few columns (of several products): then prefetching
        rows pays.
        """
        columns = products * self.column_tiles * self.columns
        return columns <= MATMUL.wide * self.row_tiles * self.rows


class Matmul(Rule):
    """Tiles of sums in registers, stored through the element-wise epilogue."""

    name = "matmul"
    anchors = frozenset({ANCHOR})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        # 1. Fuse element-wise blocks: prologue into the tile of sums, epilogue into its store.
        inline_producers(sch, ANCHOR, keep=(GATED, PAD, PACK, PARTIAL))
        store, rest = fuse_epilogue(sch, STORE)
        if find(sch, ROWS) is not None:
            sch.reverse_compute_inline(store)
            store = sch.get_sblock(ROWS)
        anchor = sch.get_sblock(ANCHOR)
        partial, packing, gated, pad = (find(sch, name) for name in (PARTIAL, PACK, GATED, PAD))
        cut = Cut.of(sch, anchor, anchor if partial is None else partial)

        # 2. Split the loops over the result; blocks of rows and panels are divided among the cores.
        loops = own_loops(sch, store)
        row, column, around = loops.pop("row"), loops.pop("column"), loops.values()
        count = sizes.number_or_expression(sch.get(row).extent)
        packs_inside = packing is not None and cut.block >= cut.row_tiles
        nest = split_into_tiles(sch, cut, row, column, around, packs_inside)
        parallel_if_worth(sch, nest.outermost, machine, cut.work)

        # 3. Sum up a tile in registers: all of the reduction, or a block of it.
        if partial is None:
            sch.compute_at(anchor, nest.row_tile, preserve_unit_loops=True)
            along = keep_in_registers(sch, anchor, [nest.row, nest.column], machine)
            vectors = cut.columns // machine.lanes(cut.bits)
            allow_short_tiles(sch, nest.row_tile, count, cut.rows, vectors)
        else:
            along = add_up_blocks(sch, partial, anchor, nest, machine, count)

        # 4. Pack columns and multiply rows by their gate: where they are used, in L1, or before. In
        #    a pass of its own, packing is divided among threads also if there are few columns.
        lanes = machine.lanes(cut.bits)
        gates_inside = gated is not None and cut.column_tiles <= MATMUL.few_gated_panels
        if packs_inside:
            sch.compute_at(packing, nest.outermost, preserve_unit_loops=True)
            vectorize(sch, sch.get_loops(packing)[-1], lanes)
        if gates_inside:
            at = nest.row_tile if partial is None else nest.outermost
            sch.compute_at(gated, at, preserve_unit_loops=True)
            vectorize(sch, sch.get_loops(gated)[-1], lanes, unroll=False)

        # 5. Prefetch the next block of weights, and the rows of the next tile.
        if not packs_inside:
            sums = anchor if partial is None else partial
            nearby = machine.keeps(cut.weights)
            fetches_rows = not gates_inside and pad is None and cut.is_narrow()
            rows = ["row_tile"] if fetches_rows else []
            fetch_ahead(sch, sums, along, cut.block, ["row_tile"], nearby, rows, cut.varying(count))

        # 6. Schedule what was not fused as loops of its own.
        inside = (packing if packs_inside else None, gated if gates_inside else None)
        for block in (packing, gated, pad, *map(sch.get_sblock, rest)):
            if block is not None and block not in inside:
                schedule_block(sch, block, machine, cut.work)
        return sch


@dataclass(frozen=True)
class Nest:
    """The loops that store a result.

    Attributes
    ----------
    outermost
        Over all blocks of tiles.
    row_tile
        Over the tiles of a block.
    row, column
        Over the rows and columns of a tile.
    """

    outermost: LoopRV
    row_tile: LoopRV
    row: LoopRV
    column: LoopRV


def split_into_tiles(
    sch: s_tir.Schedule,
    cut: Cut,
    row: LoopRV,
    column: LoopRV,
    around: Iterable[LoopRV] = (),
    is_whole: bool = False,
) -> Nest:
    """Split the loops over rows and columns as planned.

    Parameters
    ----------
    around
        The loops around these two.
    is_whole
        Whether all rows are one block, however many there are: then a panel is packed once.
    """
    row_block, row_tile, row = _split_rows(sch, cut, row, is_whole)
    column_tile, column = sch.split(column, [None, cut.columns])
    nest = [row_block, column_tile] if cut.rows_first else [column_tile, row_block]
    sch.reorder(*around, *nest, row_tile, row, column)
    return Nest(fuse(sch, [*around, *nest]), row_tile, row, column)


def _split_rows(
    sch: s_tir.Schedule, cut: Cut, row: LoopRV, is_whole: bool
) -> tuple[LoopRV, LoopRV, LoopRV]:
    """Split a loop over rows into blocks of tiles, tiles, and the rows of a tile.

    If rows are symbolic, the last block and tile may have fewer (see `bound_loops`).
    """
    if not is_symbolic(sch, row):
        return sch.split(row, [cut.row_tiles // cut.block, cut.block, cut.rows])
    row_tile, row = sch.split(row, [None, cut.rows])
    return *sch.split(row_tile, [1, None] if is_whole else [None, cut.block]), row


def add_up_blocks(
    sch: s_tir.Schedule,
    partial: SBlockRV,
    anchor: SBlockRV,
    store: Nest,
    machine: Microarchitecture,
    count: Size,
) -> LoopRV:
    """Add blocks of the reduction, from registers, to the sums of a whole block of rows.

    A single block is stored directly. `count` is the number of rows.
    """
    sch.compute_at(anchor, store.outermost, preserve_unit_loops=True)
    loops = own_loops(sch, anchor)
    blocks = [loops.pop(name) for name in ("block",) if name in loops]
    row, column, column_tile = (loops.pop(name) for name in (ROW, LANE, "column_tile"))
    rows = extent(sch, row)
    sch.reorder(*blocks, *loops.values(), column_tile, row, column)
    sch.compute_at(partial, column_tile, preserve_unit_loops=True)
    whole = (_depth(sch.get(partial)), "block") if blocks else None
    along = keep_in_registers(sch, partial, [row, column], machine, whole=whole)
    for step in blocks:
        initial = sch.get_loops(sch.decompose_reduction(anchor, step))
        sch.vectorize(initial[-1])
    lanes = machine.lanes(output_bits(sch, anchor))
    allow_short_tiles(sch, column_tile, count, rows, extent(sch, store.column) // lanes)
    vectorize(sch, store.column, lanes)
    return along


def _depth(partial: s_tir.SBlock) -> Size:
    """Return the length of the whole reduction, of which a block covers a part."""
    if DEPTH in partial.annotations:
        return int(partial.annotations[DEPTH])
    lane = Axes.of(partial)[LANE].var
    panel = next(read for read in partial.reads if read.region[-1].min.same_as(lane))
    return sizes.number_or_expression(panel.source.ty.shape[-2])
