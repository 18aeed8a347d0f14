"""Products of few rows with the rows of another activation, ``x @ y.mT``: the scores of a search.

Both operands lie along the reduction, so none is packed: a sum is a vector of partial sums, whose
lanes are added at the end. The loops::

    for each tile of columns, which are rows of y:      divided among the cores
        for each tile of rows:
            for each block of the reduction:            if it is long, or a symbol
                for each vector of the block:
                    tile += row × column                in registers
                sums += tile
            for what is left of the reduction:          less than a vector
                rest += row × column
            epilogue(sums of lanes + rest)

Packing would read and write all of y, which pays only for many rows. llamafile's ``tinyBLAS`` has
the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.costs import MATMUL, TILE
from tvmify.compiler.kernels.common.axes import LANE, ROW, Axes, loops_along, named, own_loops
from tvmify.compiler.kernels.common.bounds import size_of, written
from tvmify.compiler.kernels.common.last_block import end_with, open_ended
from tvmify.compiler.kernels.common.legalizing import call_template
from tvmify.compiler.kernels.common.loops import (
    find,
    fuse,
    iterations,
    parallel_if_worth,
    shared_out,
)
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.sums import longest_sum
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.kernels.matmul.rows import align, flatten, not_one, unflatten
from tvmify.compiler.kernels.matmul.vectors import untransposed
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

#: Names of the rule, of its block of partial sums, and of the one that stores the result.
NAME, PARTIAL, STORE = "dot products", "dots_partial", "dots_store"
#: Names of blocks that are not always there: the sums of blocks of the reduction, those of what is
#: left of it, and the result with its rows numbered through.
LANES, REST, ROWS = "dots_lanes", "dots_rest", "dots_rows"
#: Annotation of a block of partial sums: how many steps there are in all.
STEPS = "steps"
#: LLVM adds the lanes of as many sums at a time, by transposing them in registers.
_SUMS_TRANSPOSED = 4


def legalize(builder: relax.BlockBuilder, call: Call, machine: Microarchitecture) -> Expr | None:
    """Lower ``relax.matmul`` with a transposed activation; None if packing that is faster."""
    left, dtype = call.args[0], str(call.ty.dtype)
    right = untransposed(builder, call.args[1])
    if right is None or dtype not in ("float32", "float64"):
        return None
    (*batch, rows, depth), (*others, columns, _) = (
        sizes.sizes_of(x.ty.shape) for x in (left, right)
    )
    is_single = all(map(sizes.is_one, others))
    if not is_single and not sizes.same_shape(batch, others):
        return None
    if is_single:
        rows = sizes.product((*batch, rows))
    lanes = machine.lanes(bits_of(dtype))
    likely = depth if isinstance(depth, int) else max(sizes.hint(depth), MATMUL.any_depth)
    if isinstance(depth, int) and (shared := gcd(depth, lanes)) >= _SUMS_TRANSPOSED:
        lanes = shared
    if sizes.hint(rows) > min(MATMUL.dots_rows, MATMUL.dots_steps * (likely // lanes) // lanes):
        return None
    cut = Cut(
        *tile(sizes.hint(rows), sizes.hint(columns), machine),
        lanes,
        longest_sum(likely),
        written(depth // lanes),
    )
    out = sizes.sizes_of(call.ty.shape)
    template = partial(_products, cut=cut, is_single=is_single)
    return call_template(builder, template, [left, right], out, out, "dots")


@dataclass(frozen=True)
class Cut:
    """How products are cut.

    Attributes
    ----------
    rows, columns
        The tile of sums that stays in registers.
    lanes
        Of the partial sums of each.
    longest
        The most steps that a partial sum adds up.
    steps
        How many there are in all, as an annotation.
    """

    rows: int
    columns: int
    lanes: int
    longest: int
    steps: int | str


def _products(x: te.Tensor, y: te.Tensor, cut: Cut, is_single: bool) -> te.Tensor:
    """Return the products of the rows of two tensors; `is_single` says that `y` is one matrix."""
    *own, depth = x.shape
    *others, width, _ = y.shape
    heights = [1] * (len(others) + 1 - len(own)) + own
    axes = range(len(heights))
    through = (not_one(axes, heights) if is_single else []) or [*axes[-1:]]
    outer = [axis for axis in axes if axis not in through]
    numbered = [heights[axis] for axis in through]
    height = sizes.product(numbered)

    def factors(index: Sequence[Expr], along: Expr) -> Expr:
        *at, row_tile, column_tile, row, column = index
        row = _within(row_tile * cut.rows + row, height, cut.rows)
        column = _within(column_tile * cut.columns + column, width, cut.columns)
        places = dict(zip((*outer, *through), (*at, *unflatten(row, numbered)), strict=True))
        *leads, row = (places[axis] for axis in axes)
        left = x[(*align(leads, own[:-1]), row, along)]
        return left * y[(*align(leads, others), column, along)]

    leading = [f"axis{axis}" for axis in outer]
    around = [heights[axis] for axis in outer]
    nest = (*leading, "row_tile", "column_tile", ROW, "column")
    shape = (
        *around,
        sizes.ceil_div(height, cut.rows),
        sizes.ceil_div(width, cut.columns),
        cut.rows,
        cut.columns,
    )
    sums = _of_lanes(factors, shape, sizes.number_or_expression(depth), cut, nest)

    def store(*index: Expr) -> Expr:
        *at, row, column = index
        place = row // cut.rows, column // cut.columns, row % cut.rows, column % cut.columns
        return sums(*at, *place)

    if len(through) == 1:
        names = ["row" if axis in through else f"axis{axis}" for axis in axes]
        return te.compute(
            (*heights, width),
            lambda *i: store(*(i[axis] for axis in (*outer, *through, -1))),
            name=STORE,
            attrs=named(*names, "column"),
        )
    names = named(*leading, "row", "column")
    rows = te.compute((*around, height, width), store, name=ROWS, attrs=names)

    def place(*index: Expr) -> Expr:
        row = flatten([index[axis] for axis in through], numbered)
        return rows(*(index[axis] for axis in outer), row, index[-1])

    names = named(*(f"axis{axis}" for axis in axes), "column")
    return te.compute((*heights, width), place, name=STORE, attrs=names)


def _of_lanes(
    factors: Callable[[Sequence[Expr], Expr], Expr],
    shape: Sequence[Size],
    depth: Size,
    cut: Cut,
    nest: Sequence[str],
) -> Callable[..., Expr]:
    """Return a function that adds up the lanes of a sum, and what is left of its row."""
    lanes, steps = cut.lanes, depth // cut.lanes
    is_long = not isinstance(steps, int) or steps > cut.longest
    step = te.reduce_axis((0, cut.longest if is_long else steps), "step")
    names = (*nest, LANE)
    shape_of_lanes = (*shape, lanes)

    def part(block: Expr | int, *index: Expr) -> Expr:
        *at, lane = index
        return te.sum(factors(at, (block * cut.longest + step) * lanes + lane), axis=step)

    if is_long:
        blocks = sizes.ceil_div(steps, cut.longest)
        attrs = {STEPS: cut.steps} | open_ended(steps, cut.longest)
        attrs |= named("block", *names, "step")
        parts = te.compute((blocks, *shape_of_lanes), part, name=PARTIAL, attrs=attrs)
        block = te.reduce_axis((0, blocks), "block")
        sums = te.compute(
            shape_of_lanes,
            lambda *i: te.sum(parts(block, *i), axis=block),
            name=LANES,
            attrs=named(*names, "block"),
        )
    else:
        attrs = named(*names, "step")
        sums = te.compute(shape_of_lanes, lambda *i: part(0, *i), name=PARTIAL, attrs=attrs)
    rest = None
    left = depth % lanes
    if not isinstance(left, int) or left:
        k = te.reduce_axis((0, left), "k")
        rest = te.compute(
            shape,
            lambda *i: te.sum(factors(i, steps * lanes + k), axis=k),
            name=REST,
            attrs=named(*nest, "k"),
        )

    def total(*at: Expr) -> Expr:
        whole = _sum([sums(*at, lane) for lane in range(lanes)])
        return whole if rest is None else whole + rest(*at)

    return total


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
        for wide in range(_SUMS_TRANSPOSED, machine.accumulators + 1, _SUMS_TRANSPOSED)
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
        if find(sch, ROWS) is not None:
            sch.reverse_compute_inline(store)
            store = sch.get_sblock(ROWS)
        parts, sums, left = sch.get_sblock(PARTIAL), find(sch, LANES), find(sch, REST)
        tall, wide = Axes.of(sch.get(parts)).extents(ROW, "column")
        work = float(iterations(sch, parts))

        loops = own_loops(sch, store)
        row, column, outer = loops.pop("row"), loops.pop("column"), [*loops.values()]
        row_tile, row = sch.split(row, [None, tall])
        column_tile, column = sch.split(column, [None, wide])
        sch.reorder(*outer, column_tile, row_tile, row, column)
        shared = [*outer, column_tile]
        parallel_if_worth(sch, fuse(sch, shared[: shared_out(sch, shared)]), machine, work)

        at = row_tile
        if left is not None:
            sch.compute_at(left, row_tile, preserve_unit_loops=True)
            _keep_in_registers(sch, left, _outermost(sch, left, "k"))
        if sums is not None:
            sch.compute_at(sums, row_tile, preserve_unit_loops=True)
            at, *tile = _outermost(sch, sums, "block")
        sch.compute_at(parts, at, preserve_unit_loops=True)
        step, *inside = _outermost(sch, parts, "step")
        _keep_in_registers(sch, parts, [step, *inside])
        if sums is not None:
            steps = size_of(sch.get(parts).annotations[STEPS], sch.mod["main"])
            end_with(sch, parts, step, steps, "block")
            _keep_in_registers(sch, sums, [at, *tile])
        _write_out(sch, [row, column], has_lanes=False)
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch


def _outermost(sch: s_tir.Schedule, sums: SBlockRV, along: str) -> list[LoopRV]:
    """Move the loop along a reduction around a tile of sums; return it and those of the tile."""
    lanes = [LANE] if LANE in Axes.of(sch.get(sums)) else []
    loops = loops_along(sch, sums, along, ROW, "column", *lanes)
    sch.reorder(*loops)
    return loops


def _keep_in_registers(sch: s_tir.Schedule, sums: SBlockRV, loops: list[LoopRV]) -> None:
    """Keep a tile of sums in registers, given the loop along a reduction and those of the tile."""
    along, *tile = loops
    has_lanes = LANE in Axes.of(sch.get(sums))
    _write_out(sch, tile, has_lanes)  # TVM refuses it once the initial value is split off
    zeros = sch.get_loops(sch.decompose_reduction(sums, along))[-len(tile) :]
    _write_out(sch, zeros, has_lanes)
    sch.set_scope(sums, 0, "local")


def _write_out(sch: s_tir.Schedule, tile: list[LoopRV], has_lanes: bool) -> None:
    """Unroll the loops over a tile, the last of which may be the lanes of a vector."""
    if has_lanes:
        *tile, lane = tile
        sch.vectorize(lane)
    for loop in tile:
        sch.unroll(loop)
