"""Kernels without sums: element-wise chains, permutations, gathers, concatenations, padding."""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad, TensorRegion
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.costs import CORE
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    extent,
    fuse,
    is_symbolic,
    kinds,
    output_bits,
    parallel_if_worth,
    shared_out,
    traffic,
)
from tvmify.compiler.kernels.common.merge_axes import variables_apart
from tvmify.compiler.kernels.common.rewriting import collect, is_if_then_else, uses
from tvmify.compiler.kernels.common.transposes import schedule_transposes
from tvmify.compiler.kernels.common.ways import Several, Way
from tvmify.compiler.kernels.elementwise.pieces import split_rows
from tvmify.compiler.microarchitecture import Microarchitecture

#: Loops that decide conditions, as over the many small parts of a concatenation, are unrolled in
#: nests of at most this many vectors. It suffices for the 27 parts of DLRM; nothing longer was
#: measured.
_UNROLLED = 128
_WORD = 32


class Elementwise(Several):
    """One pass per result, vectorized along memory. This rule applies to any function."""

    name = "elementwise"

    def takes(self, sch: s_tir.Schedule) -> bool:
        """Whether the function is one that this rule schedules: any that no other rule has."""
        del sch
        return True

    def nest(
        self, sch: s_tir.Schedule, machine: Microarchitecture, way: Way
    ) -> s_tir.Schedule | None:
        """Schedule each block that is left by itself."""
        for block in blocks_of(sch):
            schedule_block(sch, block, machine, way.work)
        return sch


def schedule_block(
    sch: s_tir.Schedule,
    block: SBlockRV,
    machine: Microarchitecture,
    work: float,
    sums: int = 8,
) -> None:
    """Make one block a nest of its own: parallel outside, one vector inside.

    A single element, computed without a loop, is left unchanged.

    Parameters
    ----------
    work
        Multiply-adds of the whole function, which decide whether it is worth threads.
    sums
        How many vectors of sums there are inside, at most.

    Raises
    ------
    ValueError
        The loops are not one for each axis of the result and of its sums, or the result has none.
    """
    letters = kinds(sch, block)
    loops = sch.get_loops(block)
    if not loops and set(letters) == {"S"}:
        return
    if len(loops) != len(letters) or set(letters) - set("SR") or "S" not in letters:
        name = sch.get(block).name_hint
        raise ValueError(f"{name!r} has {len(loops)} loops over axes of the kinds {letters!r}")
    spatial = [loop for loop, letter in zip(loops, letters, strict=True) if letter == "S"]
    reduced = [loop for loop, letter in zip(loops, letters, strict=True) if letter == "R"]
    contiguous = contiguous_axes(sch, block)
    if schedule_transposes(sch, block, machine, work) or split_rows(
        sch, block, machine, work, alone=contiguous == 1
    ):
        return
    deciding = _axes_in_conditions(sch, block)
    if contiguous == 1 < len(spatial) and not reduced and _is_pair(sch, spatial[-1]):
        # Vectors hold several pairs, as of complex numbers, and shuffle what they load. LLVM does
        # as well where the place decides what a pair of float32 consists of.
        contiguous += not deciding[-1] or output_bits(sch, block) < _WORD
    sch.reorder(*spatial, *reduced)
    row = fuse(sch, spatial[len(spatial) - contiguous :])
    outer = spatial[: len(spatial) - contiguous]
    lanes = machine.lanes(output_bits(sch, block))
    around, vectors = _cut(sch, row, lanes, sums if reduced else 0, alone=not outer)
    deciding = [*deciding[: len(outer)], any(deciding[len(outer) :])]
    nest = [*outer, *around]
    several = [extent(sch, loop) > 1 for loop in nest]
    decided = [loop for loop, *both in zip(nest, deciding, several, strict=False) if all(both)]
    short = not is_symbolic(sch, *nest) and prod(extent(sch, x) for x in nest) <= _UNROLLED
    if short and decided and not reduced:
        for loop in decided:
            sch.unroll(loop)  # then each condition is known
    elif nest:
        threads = machine.worth_threads(work, traffic(sch.mod["main"], work))
        loops = nest if reduced else _shared(sch, outer, around, CORE.tasks if threads else 1)
        parallel_if_worth(sch, fuse(sch, loops[: shared_out(sch, loops)]), machine, work)
    if reduced:
        sch.reorder(*reduced, *vectors)
    _make_vectors(sch, vectors)
    if reduced:
        initial = sch.get_loops(sch.decompose_reduction(block, reduced[0]))
        _make_vectors(sch, initial[-len(vectors) :] if vectors else [])


def _is_pair(sch: s_tir.Schedule, loop: LoopRV) -> bool:
    return not is_symbolic(sch, loop) and extent(sch, loop) == 2


def _cut(
    sch: s_tir.Schedule, row: LoopRV, lanes: int, sums: int, *, alone: bool
) -> tuple[list[LoopRV], list[LoopRV]]:
    """Split a row into loops around its vectors, and loops of these, of which lanes are the last.

    A row shorter than a register is one vector if it is `alone` or fills half a register; otherwise
    it is not vectorized.
    """
    length = extent(sch, row)
    if length < lanes and not is_symbolic(sch, row):
        return ([], [row]) if alone or 2 * length >= lanes else ([row], [])
    around, vector = sch.split(row, [None, lanes])
    if not sums:
        return [around], [vector]
    # Several vectors of sums stay in registers: a single one would wait for its own additions, and
    # read one cache line of each row.
    width = next(n for n in (8, 4, 2, 1) if n <= sums and extent(sch, around) % n == 0)
    around, several = sch.split(around, [None, width])
    return [around], [several, vector]


def _shared(
    sch: s_tir.Schedule, outer: list[LoopRV], around: list[LoopRV], enough: int
) -> list[LoopRV]:
    """Return the loops to fuse over rows and over the vectors of a row, around those that stay.

    Each iteration of the fused loop divides to find its row, so it takes a whole row, or the
    largest part of one that leaves `enough` of them.
    """
    if not outer or is_symbolic(sch, *around):
        return [*outer, *around]
    least = -(-enough // prod(extent(sch, loop) for loop in outer))
    parts: list[LoopRV] = []
    for loop in around if least > 1 else []:
        count = extent(sch, loop)
        number = next((n for n in range(least, 4 * least) if count % n == 0), count)
        parts += sch.split(loop, [number, None])[:1]
    return [*outer, *parts]


def _make_vectors(sch: s_tir.Schedule, vectors: list[LoopRV]) -> None:
    for several in vectors[:-1]:
        sch.unroll(several)
    for lanes in vectors[-1:]:
        sch.vectorize(lanes)


def _axes_in_conditions(sch: s_tir.Schedule, block: SBlockRV) -> list[bool]:
    """Whether the place along each spatial axis decides a condition on what the block reads.

    Unrolled loops along other axes would only be more code: 128 rows of a packed weight that is
    padded to whole vectors took LLVM two seconds.
    """
    body = sch.get(block)
    values = [body.body.value] if isinstance(body.body, tirx.BufferStore) else []
    calls = [call for value in values for call in collect(value, Call)]
    conditions = [call.args[0] for call in calls if is_if_then_else(call)]
    axes = [axis.var for axis in body.iter_vars if int(axis.iter_type) == tirx.IterVar.DataPar]
    of_places = [condition for condition in conditions if not collect(condition, TensorLoad)]
    return [any(uses(condition, [axis]) for condition in of_places) for axis in axes]


def contiguous_axes(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """Return how many trailing spatial axes can be fused: they are contiguous in every tensor.

    At least one. A tensor must be indexed by exactly these axes at its end, each in full, or by
    none of them. Where a size is symbolic, nothing else may depend on the place along one of them.
    """
    body = sch.get(block)
    axes = [v for v in body.iter_vars if int(v.iter_type) == tirx.IterVar.DataPar]
    count = len(axes)
    for region in [*body.reads, *body.writes]:
        while count > 1 and not _runs_through(region, axes[-count:]):
            count -= 1
    # Places in a fused loop would be found by dividing each lane by the symbol.
    apart = variables_apart(body.body.value) if isinstance(body.body, tirx.BufferStore) else set()
    while count > 1 and not sizes.is_static(*(axis.dom.extent for axis in axes[1 - count :])):
        if not any(axis.var in apart for axis in axes[-count:]):
            break
        count -= 1
    return count


def _runs_through(region: TensorRegion, axes: list[tirx.IterVar]) -> bool:
    index = [(r.min, r.extent) for r in region.region]
    variables = [axis.var for axis in axes]
    used = [uses(minimum, variables) for minimum, _ in index]
    if not any(used):
        return True
    if len(index) < len(axes) or any(used[: len(index) - len(axes)]):
        return False
    shape = sizes.sizes_of(region.source.ty.shape)
    for i, axis in enumerate(axes):
        position = len(index) - len(axes) + i
        minimum, size = index[position]
        if not sizes.is_one(size) or not minimum.same_as(axis.var):
            return False
        if i > 0 and not sizes.same(shape[position], axis.dom.extent):
            return False
    return True
