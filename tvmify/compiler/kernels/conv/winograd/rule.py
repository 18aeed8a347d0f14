"""The loops of Winograd convolutions.

Tiles are processed in chunks. The inputs of a chunk are transformed (down and across, or only
across if the rows of the filter stay in the reduction). Then, for each tile of output channels, the
products of each point are accumulated and transformed back, with the element-wise epilogue. The
loops, outermost first:

- *own* inputs: chunk (parallel) → [transformed inputs] → channels → [point → block of inputs →
  group of tiles → registers] → tile → results. Inputs and sums of a chunk stay in L2, weights are
  read once a chunk.
- *planes*: chunk (parallel) → [rows → pixels brought together → transformed inputs] → channels →
  group of tiles → [point → registers] → tile → results, with the sums of a group in L1. Groups that
  do not divide a row: row of tiles → [point → group → registers] → tile → results.
- *shared* inputs, where chunks would be too few: all inputs are transformed first, in parallel;
  then channels → chunk (parallel) → as above. Each thread reads weights of its own, and inputs
  most of which other tasks have transformed, so it prefetches those of the next group.

oneDNN's two schedules (``jit_avx512_core_f32_wino_conv_4x3``) differ in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler.kernels.common.axes import LANE, PIXEL, ROW, Axes, loops_along, own_loops
from tvmify.compiler.kernels.common.loops import (
    extent,
    find,
    fuse,
    iterations,
    keep_in_registers,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.notes import take_note
from tvmify.compiler.kernels.common.prefetch import fetch_ahead
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.conv.winograd.plan import Chunks
from tvmify.compiler.kernels.conv.winograd.redo import redo_spoilt_tiles
from tvmify.compiler.kernels.conv.winograd.template import (
    ANCHOR,
    CHECK,
    DATA,
    DOWN,
    EXACT,
    PACK,
    PACK_DOWN,
    PAD,
    RESULT,
    SPLIT,
    SPOILT,
    STORE,
    SUMS,
    UP,
)
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.microarchitecture import Microarchitecture

#: The axes that determine which inputs a product reads, in the order of their loops.
_READ = ("point", "block", "group")


class WinogradConvolution(Rule):
    """Chunks of tiles in L2, tiles × channels in registers; see the top of this file."""

    name = "winograd"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `Winograd.kernel`, or one made by `Winograd.pack`."""
        if find(sch, PACK) is not None:
            return _schedule_pack(sch, machine)
        if find(sch, ANCHOR) is None:
            return None
        plan = take_note(sch, sch.get_sblock(ANCHOR), Chunks)
        if plan is None:
            return None
        inline_producers(sch, ANCHOR, keep=(PAD, SPLIT, DOWN, DATA))
        store, rest = fuse_epilogue(sch, STORE)
        anchor = sch.get_sblock(ANCHOR)
        axes = Axes.of(sch.get(anchor))
        work = float(iterations(sch, anchor))
        weights = 4 * prod(  # bytes: there is float32 only
            axes.extents("channel_tile", "point", "block", LANE, "k")
        )
        chunk, at, vector, stored = _cut(sch, store, plan, *axes.extents(ROW, LANE))
        parallel_if_worth(sch, chunk, machine, work)
        schedule_tile(sch, vector, stored, has_rows=plan.height > 1)
        _schedule_sums(sch, at, machine, weights, plan.shared)
        if find(sch, SPLIT) is not None:
            _schedule_planes(sch, chunk, plan.lanes)
        else:
            _schedule_data(sch, None if plan.shared else chunk, plan.lanes, machine, work)
        padding = find(sch, PAD)
        if padding is not None and plan.shared:
            schedule_block(sch, padding, machine, work)
        elif padding is not None:
            sch.compute_at(padding, chunk, preserve_unit_loops=True)
            vectorize(sch, sch.get_loops(padding)[-1], plan.lanes, unroll=False)
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return Schedule(redo_spoilt_tiles(sch.mod["main"]))


def schedule_tile(
    sch: s_tir.Schedule, vector: LoopRV, stored: Sequence[LoopRV], *, has_rows: bool = True
) -> None:
    """Transform the sums of a tile back and store it, in registers.

    Parameters
    ----------
    vector
        The loop over registers of channels, around one tile.
    stored
        The loops that store a tile, over its rows, columns and channels.
    has_rows
        Whether tiles have several rows; those of one row are transformed across alone.
    """
    in_registers(sch, stored)
    # The flag comes before the code that it guards.
    results = (RESULT, UP) if has_rows else (RESULT,)
    for name in (SPOILT, CHECK, *results, EXACT):
        block = sch.get_sblock(name)
        sch.compute_at(block, vector, preserve_unit_loops=name != SPOILT)
        sch.set_scope(block, 0, "local")
    schedule_exact(sch)
    sch.vectorize(*loops_along(sch, sch.get_sblock(CHECK), LANE))
    in_registers(sch, loops_along(sch, sch.get_sblock(RESULT), "y", "x", LANE))
    if has_rows:
        half = loops_along(sch, sch.get_sblock(UP), "y", "point", LANE)
        in_registers(sch, half, by_columns=True)


def _cut(
    sch: s_tir.Schedule, store: SBlockRV, plan: Chunks, rows: int, columns: int
) -> tuple[LoopRV, LoopRV, LoopRV, list[LoopRV]]:
    """Cut the store into chunks of tiles.

    Returns the loops over chunks, that in which sums are kept (all of a tile of channels; of
    planes, those of a group of tiles, or of a row), that over registers of channels, around one
    tile, and those of the tile.
    """
    b, y, x, c = loops_along(sch, store, *PIXEL)
    yo, yi = sch.split(y, [None, plan.height])
    xo, xi = sch.split(x, [None, plan.width])
    sch.reorder(b, yo, xo, yi, xi)
    fy, dy = sch.split(fuse(sch, [b, yo]), [None, plan.down])
    fx, dx = sch.split(xo, [None, plan.across])
    t, vector, lane = sch.split(c, [None, columns // plan.lanes, plan.lanes])
    chunks = [t, fy, fx] if plan.shared else [fy, fx, t]
    sch.reorder(*chunks, dy, dx, vector, yi, xi, lane)
    if plan.shared:
        chunk = sums = fuse(sch, chunks)
    else:
        chunk, sums = fuse(sch, [fy, fx]), t
    if find(sch, SPLIT) is not None:
        # By rows: loops along a shorter last group would depend on where it ends.
        sums = sch.split(dx, [None, rows])[0] if plan.across % rows == 0 else dy
    return chunk, sums, vector, [yi, xi, lane]


def in_registers(sch: s_tir.Schedule, tile: Sequence[LoopRV], by_columns: bool = False) -> None:
    """Unroll the loops over the rows and columns of a tile, and vectorize that over its channels.

    Going by columns, the inputs of each column are loaded once, and not kept with those of others.
    """
    row, column, channel = tile
    if by_columns:
        sch.reorder(column, row)
    sch.unroll(row)
    sch.unroll(column)
    sch.vectorize(channel)


def _schedule_sums(
    sch: s_tir.Schedule, at: LoopRV, machine: Microarchitecture, weights: int, shared: bool
) -> None:
    """Add products up in registers, block after block of input channels."""
    sums, partial = sch.get_sblock(SUMS), sch.get_sblock(ANCHOR)
    sch.compute_at(sums, at, preserve_unit_loops=True)
    several = "block" in Axes.of(sch.get(sums))
    loops = own_loops(sch, sums)
    groups = extent(sch, loops["group"])
    if several:
        sch.reorder(*loops_along(sch, sums, "point", "block", "group", ROW, LANE))
    sch.compute_at(partial, loops["group"], preserve_unit_loops=True)
    along = keep_in_registers(sch, partial, [loops[ROW], loops[LANE]], machine)
    read = _READ if shared else ()
    fetch_ahead(sch, partial, along, groups, ["group"], machine.keeps(weights), rows=read)
    if several:
        initial = sch.decompose_reduction(sums, loops["block"])
        vectorize(sch, sch.get_loops(initial)[-1], machine.lanes())


def _schedule_data(
    sch: s_tir.Schedule,
    chunk: LoopRV | None,
    lanes: int,
    machine: Microarchitecture,
    work: float,
) -> None:
    """Transform the inputs of a chunk; without one, of all chunks, in a nest of its own."""
    data, half = sch.get_sblock(DATA), find(sch, DOWN)
    if chunk is not None:
        sch.compute_at(data, chunk, preserve_unit_loops=True)
    loops = own_loops(sch, data)
    point, row, channel = (loops.pop(name) for name in ("point", ROW, "channel"))
    sch.reorder(row, channel, point)
    outer, inner = sch.split(channel, [None, lanes])
    sch.reorder(outer, point, inner)
    if chunk is None:
        parallel_if_worth(sch, fuse(sch, [*loops.values(), row]), machine, work)
    if half is not None:
        sch.compute_at(half, outer, preserve_unit_loops=True)
        sch.set_scope(half, 0, "local")
        columns = loops_along(sch, half, "point", "x", "channel")
        in_registers(sch, columns, by_columns=True)
    sch.unroll(point)
    sch.vectorize(inner)


def _schedule_planes(sch: s_tir.Schedule, chunk: LoopRV, lanes: int) -> None:
    """Transform vectors of tiles, for which strided pixels are gathered."""
    data, split = sch.get_sblock(DATA), sch.get_sblock(SPLIT)
    sch.compute_at(data, chunk, preserve_unit_loops=True)
    line, vector, point, lane = loops_along(sch, data, "line", "vector", "point", LANE)
    sch.reorder(line, vector, point, lane)
    sch.unroll(point)
    sch.vectorize(lane)
    sch.compute_at(split, line, preserve_unit_loops=True)
    phase, x = loops_along(sch, split, "phase", "x")
    sch.unroll(phase)
    vectorize(sch, x, lanes)


def schedule_exact(sch: s_tir.Schedule) -> None:
    """Keep the tile in registers here, too: all of an input may be NaN."""
    exact = sch.get_sblock(EXACT)
    nest = loops_along(sch, exact, "window_y", "window_x", "input", "y", "x", LANE)
    sch.reorder(*nest)
    tile = nest[3:]
    in_registers(sch, tile)
    initial = sch.get_loops(sch.decompose_reduction(exact, nest[0]))
    in_registers(sch, initial[-len(tile) :])


def _schedule_pack(sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule:
    pack, half = sch.get_sblock(PACK), find(sch, PACK_DOWN)
    inline_producers(sch, PACK if half is None else PACK_DOWN)
    tile, point, depth, lane = loops_along(sch, pack, "channel_tile", "point", "k", LANE)
    work = float(prod(int(v.dom.extent) for v in sch.get(pack).iter_vars))
    outer, inner = sch.split(lane, [None, min(machine.lanes(), extent(sch, lane))])
    sch.reorder(tile, depth, outer, point, inner)
    whole = fuse(sch, [tile, depth])
    parallel_if_worth(sch, whole, machine, work)
    if half is not None:
        sch.compute_at(half, outer, preserve_unit_loops=True)
        sch.set_scope(half, 0, "local")
        in_registers(sch, loops_along(sch, half, "point", "window_x", LANE))
    sch.unroll(point)
    sch.vectorize(inner)
    return sch
