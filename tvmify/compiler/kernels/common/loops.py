"""Transformations of loops and blocks that several rules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm_ffi import get_global_func

from tvmify.compiler import sizes
from tvmify.compiler.costs import CORE
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.axes import LANE, ROW, loops_along
from tvmify.compiler.kernels.common.last_block import end_with
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

_loop_kind = get_global_func("s_tir.schedule.GetLoopIterType")


def blocks_of(sch: s_tir.Schedule) -> list[SBlockRV]:
    """All blocks below the root, in program order."""
    return sch.get_child_blocks(sch.get_sblock("root"))


def find(sch: s_tir.Schedule, name: str) -> SBlockRV | None:
    """The block of this name, or None."""
    return next((block for block in blocks_of(sch) if sch.get(block).name_hint == name), None)


def extent(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """Trip count of a loop; an estimate where it `is_symbolic`."""
    return sizes.hint(sch.get(loop).extent)


def is_symbolic(sch: s_tir.Schedule, *loops: LoopRV) -> bool:
    """Whether the trip count of one of some loops differs from call to call."""
    return not all(sizes.is_static(sch.get(loop).extent) for loop in loops)


def is_compound(sch: s_tir.Schedule, loop: LoopRV) -> bool:
    """Whether the trip count of a loop is an expression of symbols, such as `size + 3`."""
    count = sch.get(loop).extent
    return not sizes.is_static(count) and not isinstance(count, tirx.Var)


def kinds(sch: s_tir.Schedule, block: SBlockRV) -> str:
    """One letter for each iteration variable: "S" spatial, "R" reduction, "O" other."""
    letters = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}
    return "".join(letters.get(int(v.iter_type), "O") for v in sch.get(block).iter_vars)


def is_reduction_loop(sch: s_tir.Schedule, loop: LoopRV) -> bool:
    """Whether the iterations of a loop add to the same elements."""
    return _loop_kind(sch, loop) == "R"


def is_injective(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether each iteration of the block writes an element of its own.

    A handwritten kernel does not: it is a block of one iteration, with loops of its own.
    """
    is_one_store = isinstance(sch.get(block).body, tirx.BufferStore)
    return is_one_store and set(kinds(sch, block)) <= {"S"}


def is_output(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether the block writes a tensor that the function returns."""
    return not sch.get_consumers(block)


def output_bits(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """Bits of one element that the block writes."""
    return bits_of(str(sch.get(block).writes[0].source.dtype))


def vectorize(sch: s_tir.Schedule, loop: LoopRV, lanes: int, unroll: bool = True) -> LoopRV | None:
    """Split off the lanes of one register and vectorize these. LLVM is very slow on vectors that
    are not one register wide (24 or 48 lanes cost tens of times more). The rest of the loop is
    unrolled, or returned.
    """
    if extent(sch, loop) <= lanes and not is_symbolic(sch, loop):
        sch.vectorize(loop)
        return None
    outer, inner = sch.split(loop, [None, lanes])
    sch.vectorize(inner)
    if unroll and not is_symbolic(sch, outer):
        sch.unroll(outer)
    return outer


def fuse(sch: s_tir.Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Fuse neighbouring loops; a single one is returned unchanged."""
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def element_count(shape: Iterable[object]) -> int:
    """Number of elements of a shape; an estimate where that has symbols."""
    return prod(map(sizes.hint, shape))


def iterations(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """How often the body of a block runs; an estimate where that has symbols."""
    return element_count(variable.dom.extent for variable in sch.get(block).iter_vars)


def exact_iterations(sch: s_tir.Schedule, block: SBlockRV) -> Size:
    """How often the body of a block runs, in symbols if it has some."""
    return sizes.product(variable.dom.extent for variable in sch.get(block).iter_vars)


def traffic(function: tirx.PrimFunc, most: float) -> float:
    """Bytes of all arguments of a function: at most `most` elements of each, such as a table."""
    total = 0.0
    for parameter in function.params:
        if hasattr(parameter.ty, "shape"):
            bits = bits_of(str(parameter.ty.dtype))
            total += min(element_count(parameter.ty.shape), most) * bits / 8
    return total


def parallel_if_worth(
    sch: s_tir.Schedule, loop: LoopRV, machine: Microarchitecture, multiply_adds: float
) -> None:
    """Mark a loop parallel unless the whole function is too short for a fork and join."""
    moved = traffic(sch.mod["main"], multiply_adds)
    if extent(sch, loop) > 1 and machine.worth_threads(multiply_adds, moved):
        sch.parallel(loop)


def shared_out(sch: s_tir.Schedule, outer: Sequence[LoopRV]) -> int:
    """Return how many of the outer loops are fused into the one that threads share: all, unless its
    index would be divided by a symbol. Such a division takes as long as several vectors, and TVM
    does not understand all quotients of padded sizes. So the loops from the first symbolic one on
    stay separate, or from the second if too few iterations would be left to share, and so on.
    """
    several = [i for i, loop in enumerate(outer) if is_symbolic(sch, loop) or extent(sch, loop) > 1]
    symbolic = [i for i in several[1:] if is_symbolic(sch, outer[i])]
    if not symbolic:
        return len(outer)
    enough = (i for i in symbolic if prod(extent(sch, loop) for loop in outer[:i]) >= CORE.tasks)
    return next(enough, symbolic[-1] + 1)


def keep_in_registers(
    sch: s_tir.Schedule,
    anchor: SBlockRV,
    stored: Sequence[LoopRV],
    machine: Microarchitecture,
    rows: Sequence[str] = (ROW,),
    reduced: Sequence[str] = ("k",),
    whole: tuple[Size, str] | None = None,
) -> LoopRV:
    """Keep a tile of sums in registers: the core of every kernel.

    Parameters
    ----------
    anchor
        The block that accumulates, already computed at its tile.
    stored
        The loops that store the tile, along its rows and, last, its columns.
    rows, reduced
        The axes of the anchor that are the rows of the tile, beside its columns (`LANE`), and
        those that it reduces over, outermost first.
    whole
        Where the innermost reduction is a block of a longer one, and the last may be shorter: the
        length of the longer one, and the axis of the anchor that numbers the blocks.

    Returns
    -------
    LoopRV
        The innermost loop along the reduction, which may take several steps at once.
    """
    *outer, along = loops_along(sch, anchor, *reduced)
    tile = loops_along(sch, anchor, *rows, LANE)
    *heights, columns = (extent(sch, loop) for loop in tile)
    bits = output_bits(sch, anchor)
    lanes, length = machine.lanes(bits), extent(sch, along)
    if sch.get(along).kind == tirx.ForKind.UNROLLED:  # a split drops the annotation
        steps = length
    else:
        lengths = [length] if whole is None else [length, whole[0]]
        if not all(isinstance(one, int) for one in lengths):
            lengths = [1]  # the end of the last block is symbolic
        steps = tiles.steps(tiles.Tile(prod(heights), columns), machine, bits, *lengths)
    along, step = sch.split(along, [None, steps])
    sch.unroll(step)
    nest = [*outer, along]
    sch.reorder(*nest, step, *tile)
    for row in tile[:-1]:
        sch.unroll(row)
    # Marks must be set before the initial value is split off: afterwards TVM refuses them.
    vectorize(sch, tile[-1], lanes)
    initial = sch.get_loops(sch.decompose_reduction(anchor, nest[0]))
    sch.vectorize(initial[-1])
    for loop in initial[-len(tile) - (columns > lanes) : -1]:
        sch.unroll(loop)
    sch.set_scope(anchor, 0, "local")
    *around, column = stored
    for row in around:
        sch.unroll(row)
    vectorize(sch, column, lanes)
    if whole is not None:
        end_with(sch, anchor, along, whole[0] if steps == 1 else whole[0] // steps, whole[1])
    return along
