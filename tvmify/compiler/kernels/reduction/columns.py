"""Reductions across memory, with all their stages in one tile of columns, where the number of
columns is symbolic. Elements are read from memory once, and sums stay in registers: a tile has one
size, which no condition ends.
"""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    extent,
    fuse,
    is_output,
    is_reduction_loop,
    kinds,
    output_bits,
    parallel_if_worth,
    shared_out,
)
from tvmify.compiler.kernels.common.whole_tiles import TILES
from tvmify.compiler.microarchitecture import Microarchitecture


def tile_columns(
    sch: s_tir.Schedule, machine: Microarchitecture, vectors: int, work: float
) -> s_tir.Schedule | None:
    """Schedule a function tile by tile; None if its stages do not have their columns in common.

    Parameters
    ----------
    vectors
        The most vectors of columns in a tile.
    """
    *_, last = blocks_of(sch)
    if "R" in kinds(sch, last) and len(sch.get(last).writes) == 1:
        # Two tiles may not add to the same elements at once, but store the same sums.
        sch.cache_write(last, 0, "global")
    leading = _leading(sch)
    if leading is None:
        return None
    width = vectors * min(machine.lanes(output_bits(sch, block)) for block in blocks_of(sch))
    while width > machine.lanes() and _bytes(sch, leading, width) > machine.working_set:
        width //= 2
    *before, last = blocks_of(sch)
    *others, column = sch.get_loops(last)
    tile, column = sch.split(column, [None, width])
    outer = [*others[:leading], tile]
    sch.reorder(*outer, *others[leading:], column)
    shared = shared_out(sch, outer)
    first = fuse(sch, outer[:shared])
    parallel_if_worth(sch, first, machine, work)
    tile = [first, *outer[shared:]][-1]
    around = len(outer) - shared + 1
    try:
        for block in reversed(before):
            sch.compute_at(block, tile)
    except s_tir.ScheduleError:  # a stage reads columns that later tiles would compute
        return None
    inside = [(block, sch.get_loops(block)[around:]) for block in (*before, last)]
    if not all(_has_columns(sch, loops, width) for _, loops in inside):
        return None
    for block, loops in inside:
        _make_vectors(sch, block, loops, machine)
    sch.annotate(tile, TILES, 1)
    return sch


def _leading(sch: s_tir.Schedule) -> int | None:
    """Return how many leading axes all stages have before their columns; None if some have others.

    The last spatial axis of each stage are the columns.
    """
    blocks = blocks_of(sch)
    if [is_output(sch, block) for block in blocks] != [False] * (len(blocks) - 1) + [True]:
        return None
    if "R" in kinds(sch, blocks[-1]):
        return None
    extents: list[list[tirx.Expr]] = []
    leading: list[int] = []
    for block in blocks:
        body, letters = sch.get(block), kinds(sch, block)
        spatial = letters.count("S")
        if not spatial or letters != "S" * spatial + "R" * (len(letters) - spatial):
            return None
        if not isinstance(body.body, tirx.BufferStore) or len(sch.get_loops(block)) != len(letters):
            return None
        own = [axis.dom.extent for axis in body.iter_vars]
        if sizes.is_static(own[spatial - 1]):
            return None
        extents.append(own[:spatial])
        if "R" in letters:
            leading.append(spatial - 1)
    count, model = min(leading), extents[-1]
    for own in extents:
        if len(own) <= count or not sizes.same(own[-1], model[-1]):
            return None
        if not all(map(sizes.same, own[:count], model[:count])):
            return None
    return count


def _bytes(sch: s_tir.Schedule, leading: int, width: int) -> int:
    """Return how much memory the stages of a tile store."""
    total = 0
    for block in blocks_of(sch):
        spatial = kinds(sch, block).count("S")
        axes = sch.get(block).iter_vars[leading : spatial - 1]
        rows = prod(sizes.hint(axis.dom.extent) for axis in axes)
        total += rows * width * output_bits(sch, block) // 8
    return total


def _has_columns(sch: s_tir.Schedule, loops: list[LoopRV], width: int) -> bool:
    """Whether a stage computes just the columns of its tile."""
    spatial = [loop for loop in loops if not is_reduction_loop(sch, loop)]
    return bool(spatial) and sizes.same(sch.get(spatial[-1]).extent, width)


def _make_vectors(
    sch: s_tir.Schedule, block: SBlockRV, loops: list[LoopRV], machine: Microarchitecture
) -> None:
    """Schedule the loops of a stage inside a tile."""
    reduced = [loop for loop in loops if is_reduction_loop(sch, loop)]
    *rows, column = (loop for loop in loops if loop not in reduced)
    width = min(extent(sch, column), machine.lanes(output_bits(sch, block)))
    several, lanes = sch.split(column, [None, width])
    if reduced:
        sch.reorder(*rows, *reduced, several, lanes)
    sch.vectorize(lanes)
    if reduced:
        sch.unroll(several)
        initial = sch.get_loops(sch.decompose_reduction(block, reduced[0]))
        sch.vectorize(initial[-1])
        sch.unroll(initial[-2])
