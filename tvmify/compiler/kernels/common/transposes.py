"""Transposes, and chains that begin with one. The loops, outermost first: tiles of the result, in
parallel; a tile is copied to the stack in whole vectors, along the memory of the operand; then the
chain reads the copy transposed. Without the copy, each lane of a vector comes from another cache
line, and lines a power of two apart evict each other before their second element is read.
"""

from __future__ import annotations

from tvm import s_tir, sym, tirx
from tvm.ir import Call, Expr, TensorRegion
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler.kernels.common.loops import (
    extent,
    fuse,
    is_injective,
    is_symbolic,
    output_bits,
    parallel_if_worth,
    shared_out,
)
from tvmify.compiler.kernels.common.rewriting import collect, is_if_then_else, uses
from tvmify.compiler.kernels.common.whole_tiles import TILES
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import is_one

#: Annotation of the loop that reads a tile across, for `codegen.transpose_tiles`.
ACROSS = "tvmify.across"
#: The most rows of a tile, which stays below the kilobyte that TVM leaves on the stack.
_MOST_ROWS = 16
#: The fewest rows of a tile where their number is symbolic.
_LEAST_ROWS = 8


def schedule_transposes(
    sch: s_tir.Schedule, block: SBlockRV, machine: Microarchitecture, work: float
) -> bool:
    """Schedule a nest tile by tile if it reads operands transposed; return whether it does.

    The block must be a nest of its own, one loop per axis.
    """
    lanes = min(machine.lanes(output_bits(sch, block)), _MOST_ROWS)
    found = _across(sch, block)
    if found is None:
        return False
    axis, reads = found
    loops = sch.get_loops(block)
    column, row = loops[-1], loops[axis]
    sides = [_side(sch, loop, lanes) for loop in (row, column)]
    if 2 * min(sides) < lanes:
        return False
    if is_symbolic(sch, column) and is_symbolic(sch, row):
        sides = [min(sides)] * 2
    any_size = is_symbolic(sch, column, row)
    row_tile, row = sch.split(row, [None, sides[0]])
    column_tile, column = sch.split(column, [None, sides[1]])
    outer = [*loops[:axis], row_tile, *loops[axis + 1 : -1], column_tile]
    sch.reorder(*outer, row, column)
    shared = shared_out(sch, outer)
    tile = fuse(sch, outer[:shared])
    parallel_if_worth(sch, tile, machine, work)
    tile = [tile, *outer[shared:]][-1]
    for read in reads:
        copy = sch.cache_read(block, read, "local", [block])
        sch.compute_at(copy, tile)
        *_, along = sch.get_loops(copy)
        sch.vectorize(along)
    if any_size:
        sch.annotate(tile, TILES, 1)
    sch.annotate(row, ACROSS, 1)
    sch.unroll(row)
    sch.vectorize(column)
    return True


def _side(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> int:
    """Return how many iterations of a loop a tile has.

    A symbolic loop is mostly longer than what the program is tuned for, of a batch for example.
    """
    if not is_symbolic(sch, loop):
        return min(lanes, extent(sch, loop))
    likely = 1 << extent(sch, loop).bit_length() - 1
    return min(lanes, max(likely, _LEAST_ROWS))


def must_stay(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether a block is read across its memory, which inlining would hide.

    It then becomes a separate pass along its memory: two such passes are faster than one that reads
    element by element. Not if the consumer undoes a transpose of the block itself.
    """
    body = sch.get(block)
    axes = [variable.var for variable in body.iter_vars]
    odd = [read for read in body.reads if _places(read, axes) is None]
    if not odd:
        return False
    for consumer in sch.get_consumers(block):
        if _across(sch, consumer) is None:
            continue
        last = _last_axis(sch, consumer, body.writes[0].source)
        along = None if last is None else axes[last]
        if not all(_goes_along(read.region[-1].min, axes, along) for read in odd):
            return True
    return False


def _goes_along(index: Expr, axes: list[tirx.Var], along: tirx.Var | None) -> bool:
    """Whether the last index of an operand depends on one of some axes only, or grows with it, as
    that of a channel in one of several groups.
    """
    if along is not None:
        step = sym.detect_linear_equation(index, [along])
        if step and is_one(step[0]):
            return True
    return not uses(index, [axis for axis in axes if axis is not along])


def _last_axis(sch: s_tir.Schedule, consumer: SBlockRV, tensor: tirx.Var) -> int | None:
    """Which axis of a tensor lies along the memory of the block that reads it."""
    body = sch.get(consumer)
    axes = [variable.var for variable in body.iter_vars]
    read = next(read for read in body.reads if read.source.same_as(tensor))
    places = _places(read, axes)
    return places.index(len(axes) - 1) if places and len(axes) - 1 in places else None


def _across(sch: s_tir.Schedule, block: SBlockRV) -> tuple[int, list[int]] | None:
    """Which axis of the result is the last of some operands, if its own last is not, and which."""
    body = sch.get(block)
    # A guarded read may be outside the operand where the guard fails; the copy would be unguarded.
    if not is_injective(sch, block) or any(map(is_if_then_else, collect(body.body, Call))):
        return None
    axes = [variable.var for variable in body.iter_vars]
    last = len(axes) - 1
    found: dict[int, list[int]] = {}
    for number, read in enumerate(body.reads):
        places = _places(read, axes)
        along = places[-1] if places else None
        if along not in (None, last) and last in places:
            found.setdefault(along, []).append(number)
    return next(iter(found.items()), None)


def _places(read: TensorRegion, axes: list[tirx.Var]) -> list[int | None] | None:
    """Which axis of the result each index of an operand is, None for a constant.

    None if an index is something else, or the operand is read in several places at once.
    """
    places: list[int | None] = []
    for part in read.region:
        place = next((i for i, axis in enumerate(axes) if axis.same_as(part.min)), None)
        is_single = isinstance(part.extent, tirx.IntImm) and int(part.extent) == 1
        if not is_single or (place is None and not isinstance(part.min, tirx.IntImm)):
            return None
        places.append(place)
    return places
