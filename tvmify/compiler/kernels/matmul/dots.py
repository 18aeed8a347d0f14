"""Products of few rows with the rows of another activation, ``x @ y.mT``: the scores of a search.

Both operands lie along the reduction, so none is packed: a sum is a vector of partial sums, whose
lanes are added at the end. The loops::

    for each tile of columns, which are rows of y:      divided among the cores
        for each tile of rows:
            for each vector along the reduction:
                tile += row × column                    in registers
            epilogue(sums of lanes)

Packing would read and write all of y, which pays only for many rows. llamafile's ``tinyBLAS`` has
the same tiles.
"""

from __future__ import annotations

from math import gcd

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import MATMUL, TILE
from tvmify.compiler.kernels.common.axes import LANE, ROW, Axes, loops_along, named, own_loops
from tvmify.compiler.kernels.common.legalizing import call_template
from tvmify.compiler.kernels.common.loops import (
    fuse,
    iterations,
    parallel_if_worth,
    shared_out,
)
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.kernels.matmul.plan import longest_sum
from tvmify.compiler.kernels.matmul.rows import align
from tvmify.compiler.kernels.matmul.vectors import untransposed
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

#: Names of the rule, of its block of partial sums, and of the one that stores the result.
NAME, PARTIAL, STORE = "dot products", "dots_partial", "dots_store"
#: LLVM adds the lanes of as many sums at a time, by transposing them in registers.
_TOGETHER = 4


def legalize(builder: relax.BlockBuilder, call: Call, machine: Microarchitecture) -> Expr | None:
    """Lower ``relax.matmul`` with a transposed activation; None if packing that is faster."""
    left, dtype = call.args[0], str(call.ty.dtype)
    right = untransposed(builder, call.args[1])
    if right is None or dtype not in ("float32", "float64"):
        return None
    (*batch, rows, depth), (*others, columns, _) = (
        sizes.sizes_of(x.ty.shape) for x in (left, right)
    )
    is_whole = sizes.same_shape(batch, others) or all(map(sizes.is_one, (*batch, *others)))
    if not is_whole or not isinstance(depth, int):
        return None
    lanes = gcd(depth, machine.lanes(bits_of(dtype)))
    steps = depth // lanes
    if lanes < _TOGETHER or steps > longest_sum(depth):
        return None
    if sizes.hint(rows) > min(MATMUL.dots_rows, MATMUL.dots_steps * steps // lanes):
        return None
    tall, wide = tile(sizes.hint(rows), sizes.hint(columns), machine)

    def template(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        step = te.reduce_axis((0, steps), "step")
        *own, height, _ = x.shape
        *others, width, _ = y.shape
        outer = max(own, others, key=len)  # all of one element if they differ
        axes = [f"axis{i}" for i in range(len(outer))]

        def partial(*index: tirx.Var) -> Expr:
            *at, row_tile, column_tile, row, column, lane = index
            row = _within(row_tile * tall + row, height, tall)
            column = _within(column_tile * wide + column, width, wide)
            along = step * lanes + lane
            left = x[(*align(at, own), row, along)]
            return te.sum(left * y[(*align(at, others), column, along)], axis=step)

        tiles = sizes.ceil_div(height, tall), sizes.ceil_div(width, wide)
        names = named(*axes, "row_tile", "column_tile", ROW, "column", LANE, "step")
        sums = te.compute((*outer, *tiles, tall, wide, lanes), partial, name=PARTIAL, attrs=names)

        def store(*index: tirx.Var) -> Expr:
            *at, row, column = index
            place = *at, row // tall, column // wide, row % tall, column % wide
            return _sum([sums[(*place, lane)] for lane in range(lanes)])

        names = named(*axes, "row", "column")
        return te.compute((*outer, height, width), store, name=STORE, attrs=names)

    out = sizes.sizes_of(call.ty.shape)
    return call_template(builder, template, [left, right], out, out, "dots")


def tile(rows: int, columns: int, machine: Microarchitecture) -> tuple[int, int]:
    """Return the rows and columns of the tile of sums that takes the fewest cycles."""

    def cost(shape: tuple[int, int]) -> tuple[float, int]:
        tall, wide = shape
        count = -(-rows // tall) * -(-columns // wide)
        # Two vectors are loaded in a cycle.
        cycles = max(tall * wide / machine.units, (tall + wide) / 2, TILE.latency)
        return count * cycles, count * (tall + wide)

    fitting = (
        (tall, wide)
        for wide in range(_TOGETHER, machine.accumulators + 1, _TOGETHER)
        for tall in range(1, min(rows, machine.accumulators // wide) + 1)
        if tall * wide + min(tall, wide) < machine.vector_registers
    )
    return min(fitting, key=cost)


def _within(index: Expr, size: Size, tile: int) -> Expr:
    """Return an index in a tile; beyond the end, the last one, which is read again."""
    if sizes.is_static(size) and int(size) % tile == 0:
        return index
    return tirx.min(index, size - 1)


def _sum(terms: list[Expr]) -> Expr:
    """Add the two halves until one term is left."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [one + other for one, other in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


class DotProducts(Rule):
    """Tiles of partial sums in registers, whose lanes are added in front of the epilogue."""

    name = NAME
    anchors = frozenset({PARTIAL})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        inline_producers(sch, PARTIAL)
        store, rest = fuse_epilogue(sch, STORE)
        partial = sch.get_sblock(PARTIAL)
        tall, wide = Axes.of(sch.get(partial)).extents(ROW, "column")
        work = float(iterations(sch, partial))

        loops = own_loops(sch, store)
        row, column, outer = loops.pop("row"), loops.pop("column"), [*loops.values()]
        row_tile, row = sch.split(row, [None, tall])
        column_tile, column = sch.split(column, [None, wide])
        sch.reorder(*outer, column_tile, row_tile, row, column)
        shared = [*outer, column_tile]
        parallel_if_worth(sch, fuse(sch, shared[: shared_out(sch, shared)]), machine, work)

        sch.compute_at(partial, row_tile, preserve_unit_loops=True)
        step, *sums, lane = loops_along(sch, partial, "step", ROW, "column", LANE)
        sch.reorder(step, *sums, lane)
        sch.vectorize(lane)
        *_, row_of_zeros, column_of_zeros, zeros = sch.get_loops(
            sch.decompose_reduction(partial, step)
        )
        sch.vectorize(zeros)
        for loop in (*sums, row_of_zeros, column_of_zeros, row, column):
            sch.unroll(loop)
        sch.set_scope(partial, 0, "local")
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch
