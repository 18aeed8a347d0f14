"""The loops of the first and the last kernel of `any_size`; the second is a matrix product."""

from __future__ import annotations

from tvm import s_tir

from tvmify.compiler.kernels.common.axes import PIXEL, loops_along
from tvmify.compiler.kernels.common.loops import (
    find,
    fuse,
    iterations,
    parallel_if_worth,
)
from tvmify.compiler.kernels.common.notes import take_note
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.conv.winograd.plan import Chunks
from tvmify.compiler.kernels.conv.winograd.redo import redo_spoilt_tiles
from tvmify.compiler.kernels.conv.winograd.rule import in_registers, schedule_tile
from tvmify.compiler.kernels.conv.winograd.template import (
    DATA,
    DOWN,
    PAD,
    RESULT,
    STORE,
    UP,
)
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.microarchitecture import Microarchitecture


class WinogradInputs(Rule):
    """A tile after the other, and for each vector of channels both transforms in registers."""

    name = "winograd inputs"
    anchors = frozenset({DATA, DOWN})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `AnySize.inputs`."""
        data, half = sch.get_sblock(DATA), sch.get_sblock(DOWN)
        plan = take_note(sch, data, Chunks)
        if plan is None:
            return None
        inline_producers(sch, DOWN, keep=(PAD,))
        work = float(iterations(sch, data))
        point, b, y, x, channel = loops_along(
            sch, data, "point", "image", "y_tile", "x_tile", "channel"
        )
        outer, inner = sch.split(channel, [None, plan.lanes])
        sch.reorder(b, y, x, outer, point, inner)
        parallel_if_worth(sch, fuse(sch, [b, y]), machine, work)
        sch.compute_at(half, outer, preserve_unit_loops=True)
        sch.set_scope(half, 0, "local")
        columns = loops_along(sch, half, "point", "x", "channel")
        in_registers(sch, columns, by_columns=True)
        sch.unroll(point)
        sch.vectorize(inner)
        padding = find(sch, PAD)
        if padding is not None:
            schedule_block(sch, padding, machine, work)
        return sch


class WinogradResults(Rule):
    """A tile after the other, and for each vector of channels both transforms in registers."""

    name = "winograd results"
    anchors = frozenset({RESULT, STORE})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `AnySize.results`."""
        plan = take_note(sch, sch.get_sblock(STORE), Chunks)
        if plan is None:
            return None
        inline_producers(sch, RESULT, keep=(UP,))
        store, rest = fuse_epilogue(sch, STORE)
        work = float(iterations(sch, sch.get_sblock(UP)))
        b, y, x, c = loops_along(sch, store, *PIXEL)
        yo, yi = sch.split(y, [None, plan.height])
        xo, xi = sch.split(x, [None, plan.width])
        vector, lane = sch.split(c, [None, plan.lanes])
        sch.reorder(b, yo, xo, vector, yi, xi, lane)
        parallel_if_worth(sch, fuse(sch, [b, yo]), machine, work)
        schedule_tile(sch, vector, [yi, xi, lane])
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return Schedule(redo_spoilt_tiles(sch.mod["main"]))
