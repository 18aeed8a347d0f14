"""Reductions along rows: softmax, norms, means, maxima, with any number of stages."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.costs import NEST
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    element_count,
    extent,
    fuse,
    is_compound,
    is_output,
    is_reduction_loop,
    is_symbolic,
    kinds,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.rewriting import uses
from tvmify.compiler.kernels.common.tails import remember_bound
from tvmify.compiler.kernels.common.ways import Several, Way
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.reduction.columns import tile_columns
from tvmify.compiler.kernels.reduction.template import LONGEST
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import Size

#: Partial sums that are added up in one step.
_STEP = 4


class _OfSums(Several):
    """A rule for functions with reductions."""

    def takes(self, sch: s_tir.Schedule) -> bool:
        """Tell whether there is such a stage."""
        return any("R" in kinds(sch, block) for block in blocks_of(sch))


class Reduction(_OfSums):
    """One parallel loop over rows; all stages of a row inside it, each vectorized along the row. A
    sum along a row becomes a few vectors of partial sums, which are folded at the end of the row.
    This is also more accurate than one long sum.
    """

    name = "reduction"
    #: Four vectors hide the latency of an addition, which is four cycles.
    ways = Way(4), Way(8), Way(2)

    def nest(
        self, sch: s_tir.Schedule, machine: Microarchitecture, way: Way
    ) -> s_tir.Schedule | None:
        """Schedule a function whose reductions all run along the last axes of one set of rows."""
        rows = _row_axes(sch)
        if rows is None:
            return None
        for block in blocks_of(sch):
            if not sch.get_loops(block):  # one number; without a loop TVM cannot split its sum
                sch.add_unit_loop(block)
        chunks: list[str] = []
        try:
            for block in blocks_of(sch):
                if "R" in kinds(sch, block):
                    name = sch.get(block).name_hint
                    chunks += _split_into_partials(sch, name, rows, machine, way.vectors)
        except s_tir.ScheduleError:  # TVM cannot split it, such as maxima that keep NaN
            return None
        *before, last = blocks_of(sch)
        loops = sch.get_loops(last)
        own = 1
        if rows:
            # TVM finds no quotient by `size + 3` in a product with it: it is a loop of its own.
            known = next((i for i in range(1, rows) if is_compound(sch, loops[i])), rows)
            row = fuse(sch, loops[:known])
            parallel_if_worth(sch, row, machine, way.work)
            if known < rows:
                row, own = fuse(sch, loops[known:rows]), 2
        else:
            # A single row gets a loop, too: `compute_at` then drops the predicates of its partial
            # sums, with which TVM would take these blocks for non-affine and refuse to reorder
            # their loops.
            row = sch.add_unit_loop(loops[0])
        for block in reversed(before):
            sch.compute_at(block, row)
        for block in (*before, last):
            if sch.get(block).name_hint not in chunks:
                _vectorize_row(sch, block, sch.get_loops(block)[own:], machine)
        _add_chunks(sch, chunks, own, machine)
        return sch


def _add_chunks(
    sch: s_tir.Schedule, chunks: list[str], own: int, machine: Microarchitecture
) -> None:
    """Compute each chunk's sums, inside `own` loops over rows, where they are added to a total."""
    for block in map(sch.get_sblock, chunks):
        (total,) = sch.get_consumers(block)
        sch.compute_at(block, sch.get_loops(total)[own])
        _vectorize_row(sch, block, sch.get_loops(block)[own + 1 :], machine)


class ColumnReduction(_OfSums):
    """Reductions across memory: the lanes of a vector are not added to each other."""

    name = "column reduction"
    ways = Way(8), Way(2)

    def nest(
        self, sch: s_tir.Schedule, machine: Microarchitecture, way: Way
    ) -> s_tir.Schedule | None:
        """Schedule a function with a reduction: tiles of all stages, or else stage by stage."""
        if any(is_symbolic(sch, *sch.get_loops(block)) for block in blocks_of(sch)):
            tiled = tile_columns(sch.copy(), machine, way.vectors, way.work)
            if tiled is not None:
                return tiled
        for block in blocks_of(sch):
            schedule_block(sch, block, machine, way.work, sums=way.vectors)
        return sch


def _row_axes(sch: s_tir.Schedule) -> int | None:
    """Return how many leading axes number the rows; None if a reduction is not along such rows."""
    blocks = blocks_of(sch)
    if sum(is_output(sch, block) for block in blocks) != 1:
        return None
    counts, extents = [], []
    for block in blocks:
        letters = kinds(sch, block)
        if set(letters) - set("SR") or "S" in letters.lstrip("S"):
            return None
        extents.append([sizes.comparable(v.dom.extent) for v in sch.get(block).iter_vars])
        if "R" in letters:
            counts.append((letters.count("S"), extents[-1]))
            # Lanes that are columns would be better, if there is more than one.
            by_columns = not _runs_along_memory(sch, block) or _reads_often(sch, block)
            if by_columns and "S" in letters:
                return None
    # A reduction that keeps its axes, as axes of one element, has the same rows.
    for rows in range(min(count for count, _ in counts), -1, -1):
        units = all(size == 1 for count, own in counts for size in own[rows:count])
        if units and all(own[:rows] == extents[0][:rows] for own in extents):
            return rows
    return None


def _runs_along_memory(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    body = sch.get(block)
    innermost = body.iter_vars[-1].var
    regions = [read.region for read in body.reads if read.region]
    if not regions or sizes.is_one(body.iter_vars[-1].dom.extent):
        return True  # it sums the same number or constant repeatedly
    return uses(max(regions, key=len)[-1].min, [innermost])


def _reads_often(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether elements take part in several sums, as in a convolution: then columns are better."""
    body = sch.get(block)
    largest = max((element_count(read.source.ty.shape) for read in body.reads), default=1)
    return element_count(variable.dom.extent for variable in body.iter_vars) > 2 * largest


def _split_into_partials(
    sch: s_tir.Schedule, name: str, rows: int, machine: Microarchitecture, vectors: int
) -> list[str]:
    """Turn one sum per row into some vectors of partial sums, folded in steps of four.

    Returns
    -------
    list
        The name of the block that sums chunks of `LONGEST` steps, if a row of symbolic length is
        likely longer.
    """
    block = sch.get_sblock(name)
    body = sch.get(block)
    if len(body.writes) > 1:  # of a value and its index, which is not vectorized
        return []
    lanes = machine.lanes(output_bits(sch, block))
    spatial = kinds(sch, block).count("S")
    whole = fuse(sch, sch.get_loops(block)[spatial:])
    width = lanes * vectors
    while width > lanes and extent(sch, whole) < 2 * width:
        width //= 2
    chunks: list[str] = []
    if is_symbolic(sch, whole) and extent(sch, whole) > LONGEST * width:
        length = sch.get(whole).extent
        _, _, inner = sch.split(whole, [None, LONGEST, width])
        partial = sch.rfactor(inner, rows)
        chunk = sch.rfactor(sch.get_loops(partial)[-3], rows)
        _remember(sch, chunk, length, [LONGEST * width, 1], width)
        chunks.append(sch.get(chunk).name_hint)
        whole = sch.get_loops(sch.get_sblock(name))[-1]
        width //= _STEP
    while width < NEST.most_sums and extent(sch, whole) > LONGEST * width:
        width *= 2
    while width >= _STEP and (extent(sch, whole) > width or is_symbolic(sch, whole)):
        length = sch.get(whole).extent
        _, inner = sch.split(whole, [None, width])
        partial = sch.rfactor(inner, rows)
        if not sizes.is_static(length) or int(length) % width:
            _remember(sch, partial, length, [1], width)
        whole = sch.get_loops(sch.get_sblock(name))[-1]
        width //= _STEP
    return chunks


def _remember(
    sch: s_tir.Schedule, block: SBlockRV, length: Size, first: list[int], width: int
) -> None:
    """Remember the length of a row for a block with sums of some elements `width` apart.

    Parameters
    ----------
    first
        By how much a step along each of the first axes, which `rfactor` added, moves in the row.
    """
    axes = sch.get(block).iter_vars[len(first) :]
    steps = (width * (int(axis.iter_type) == tirx.IterVar.CommReduce) for axis in axes)
    remember_bound(sch, block, length, [*first, *steps])


def _vectorize_row(
    sch: s_tir.Schedule, block: SBlockRV, loops: list[LoopRV], machine: Microarchitecture
) -> None:
    lanes = machine.lanes(output_bits(sch, block))
    reduced = [loop for loop in loops if is_reduction_loop(sch, loop)]
    spatial = [loop for loop in loops if loop not in reduced and extent(sch, loop) > 1]
    if not reduced:
        if spatial:
            vectorize(sch, spatial[-1], lanes, unroll=False)
        return
    if not spatial:
        sch.decompose_reduction(block, reduced[0])
        return
    sch.reorder(*reduced, spatial[-1])
    several = extent(sch, spatial[-1]) > lanes
    vectorize(sch, spatial[-1], lanes)
    initial = sch.get_loops(sch.decompose_reduction(block, reduced[0]))
    sch.vectorize(initial[-1])
    if several:
        sch.unroll(initial[-2])
