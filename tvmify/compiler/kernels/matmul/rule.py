"""Matrix products with packed weights or of two activations, with any number of rows and columns.

The loops, outermost first: blocks of rows and panels of columns, in the order of the plan and
divided among the cores; blocks of the reduction; tiles of rows; the steps of one block of the
reduction; the tile, in registers. So a block of a panel is read from memory once and stays in L1
for all tiles of rows, while the next one is prefetched (`prefetch`). With a single block of the
reduction the tile is stored directly; otherwise its sums are added to those of the block of rows,
which stay in L2 until the epilogue.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax, s_tir
from tvm.ir import Call, Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.costs import MATMUL
from tvmify.compiler.kernels.common.axes import LANE, ROW, Axes, own_loops
from tvmify.compiler.kernels.common.legalizing import is_weight, plain
from tvmify.compiler.kernels.common.loops import (
    element_count,
    extent,
    find,
    fuse,
    is_reduction_loop,
    is_symbolic,
    keep_in_registers,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.prefetch import fetch_ahead
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.short_tiles import half_last_tile
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.kernels.matmul import compact, pairs, plan
from tvmify.compiler.kernels.matmul.template import (
    ANCHOR,
    BLOCK,
    DEPTH,
    GATED,
    PACK,
    PAD,
    PARTIAL,
    ROWS,
    ROWS_FIRST,
    STORE,
    Product,
    stacked,
)
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.matmul``; weights are packed in a separate call, which can be lifted."""
    left, right = call.args
    out, left_shape, right_shape = (sizes.sizes_of(x.ty.shape) for x in (call, left, right))
    dtype = str(call.ty.dtype)
    # Dot products and matrix-vector products fill no tile; the reduction rule vectorizes them.
    if min(len(left_shape), len(right_shape)) < 2 or sizes.is_one(out[-1]) or dtype == "bool":
        return plain(builder, call)
    if min(sizes.hints(left_shape + right_shape)) == 0:
        return plain(builder, call)
    machine = Microarchitecture.current()
    packed = is_weight(builder, right)
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
    product = Product.of(left_shape, right_shape, out, dtype, machine, packed, is_compact, paired)
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
        primfunc_attrs={"op_pattern": 4},
    )


class Matmul(Rule):
    """Tiles of sums in registers, stored through the element-wise epilogue."""

    name = "matmul"
    anchors = frozenset({ANCHOR})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        inline_producers(sch, ANCHOR, keep=(GATED, PAD, PACK, PARTIAL))
        store, rest = fuse_epilogue(sch, STORE)
        anchor = sch.get_sblock(ANCHOR)
        block = sch.get(anchor)
        partial, packing, gated = (find(sch, name) for name in (PARTIAL, PACK, GATED))
        padded = [PAD] * (find(sch, PAD) is not None)
        row_tiles, column_tiles, rows, columns = Axes.of(block).extents(
            "row_tile", "column_tile", ROW, LANE
        )
        block_tiles = int(block.annotations[BLOCK])
        summed = sch.get(partial) if partial is not None else block
        work = float(element_count(v.dom.extent for v in summed.iter_vars))
        bits = bits_of(str(block.writes[0].source.dtype))
        lanes = machine.lanes(bits)
        if find(sch, ROWS) is not None:
            sch.reverse_compute_inline(store)
            store = sch.get_sblock(ROWS)
        loops = own_loops(sch, store)
        row, column, around = loops.pop("row"), loops.pop("column"), loops.values()
        count = sizes.number_or_expression(sch.get(row).extent)
        fewest = plan.fewest(block_tiles) if is_symbolic(sch, row) else block_tiles
        outermost, row_tile = split_into_tiles(sch, block, row, column, around)
        parallel_if_worth(sch, outermost, machine, work)
        if gated is not None and column_tiles > MATMUL.few_gated_panels:
            schedule_block(sch, gated, machine, work)
            gated = None
        if packing is not None and block_tiles < row_tiles:
            # Few columns: the copy is a separate pass, and rows are divided among threads as well.
            schedule_block(sch, packing, machine, work)
            packing = None
        if partial is None:
            sch.compute_at(anchor, row_tile, preserve_unit_loops=True)
            along = keep_in_registers(sch, anchor, store, machine)
            half_last_tile(sch, row_tile, count, rows)
        else:
            sch.compute_at(anchor, outermost, preserve_unit_loops=True)
            along = add_up_blocks(sch, partial, anchor, store, machine, count)
        if packing is not None:
            sch.compute_at(packing, outermost, preserve_unit_loops=True)
            vectorize(sch, sch.get_loops(packing)[-1], lanes)
        if gated is not None:
            # Rows are multiplied where they are used, in L1.
            at = row_tile if partial is None else outermost
            sch.compute_at(gated, at, preserve_unit_loops=True)
            vectorize(sch, sch.get_loops(gated)[-1], lanes, unroll=False)
        if packing is None:
            fetch_ahead(
                sch,
                anchor if partial is None else partial,
                along,
                block_tiles,
                ["row_tile"],
                nearby=machine.keeps(work / (row_tiles * rows) * bits / 8),
                fewest=fewest,
                rows=["row_tile"]
                * (
                    gated is None
                    and not padded
                    and column_tiles * columns <= MATMUL.wide * row_tiles * rows
                ),
            )
        for name in [*padded, *rest]:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch


def split_into_tiles(
    sch: s_tir.Schedule,
    anchor: s_tir.SBlock,
    row: LoopRV,
    column: LoopRV,
    around: Iterable[LoopRV] = (),
) -> tuple[LoopRV, LoopRV]:
    """Split the loops over rows and columns as planned.

    Parameters
    ----------
    anchor
        The block with the plan.
    around
        The loops around these two.

    Returns
    -------
    LoopRV, LoopRV
        The loop over all blocks of tiles, and the one over the tiles of a block.
    """
    row_tiles, rows, columns = Axes.of(anchor).extents("row_tile", ROW, LANE)
    row_block, row_tile, row = _split_rows(
        sch, row, row_tiles, int(anchor.annotations[BLOCK]), rows
    )
    column_tile, column = sch.split(column, [None, columns])
    rows_first = bool(anchor.annotations[ROWS_FIRST])
    nest = [row_block, column_tile] if rows_first else [column_tile, row_block]
    sch.reorder(*around, *nest, row_tile, row, column)
    return fuse(sch, [*around, *nest]), row_tile


def _split_rows(
    sch: s_tir.Schedule, row: LoopRV, row_tiles: int, block_tiles: int, rows: int
) -> tuple[LoopRV, LoopRV, LoopRV]:
    """Split a loop over rows into blocks of tiles, tiles, and the rows of a tile.

    If there are symbolic rows, the last of each may have fewer (see `bound_loops`).
    """
    if not is_symbolic(sch, row):
        return sch.split(row, [row_tiles // block_tiles, block_tiles, rows])
    row_tile, row = sch.split(row, [None, rows])
    return *sch.split(row_tile, [None, block_tiles]), row


def add_up_blocks(
    sch: s_tir.Schedule,
    partial: SBlockRV,
    anchor: SBlockRV,
    store: SBlockRV,
    machine: Microarchitecture,
    count: Size,
) -> LoopRV:
    """Add blocks of the reduction, from registers, to the sums of a whole block of rows.

    A single block is stored directly. `count` is the number of rows.
    """
    loops = sch.get_loops(anchor)[1:]
    blocks = [loop for loop in loops if is_reduction_loop(sch, loop)]
    *nest, row, column = loops[: len(loops) - len(blocks)]
    rows = extent(sch, row)
    sch.reorder(*blocks, *nest, row, column)
    sch.compute_at(partial, nest[-1], preserve_unit_loops=True)
    whole = (_depth(sch.get(partial)), "block") if blocks else None
    along = keep_in_registers(sch, partial, anchor, machine, whole=whole)
    for step in blocks:
        initial = sch.get_loops(sch.decompose_reduction(anchor, step))
        sch.vectorize(initial[-1])
    half_last_tile(sch, nest[-1], count, rows)
    vectorize(sch, sch.get_loops(store)[-1], machine.lanes(output_bits(sch, anchor)))
    return along


def _depth(partial: s_tir.SBlock) -> Size:
    """Return the length of the whole reduction, of which a block covers a part."""
    if DEPTH in partial.annotations:
        return int(partial.annotations[DEPTH])
    lane = Axes.of(partial)[LANE].var
    panel = next(read for read in partial.reads if read.region[-1].min.same_as(lane))
    return sizes.number_or_expression(panel.source.ty.shape[-2])
