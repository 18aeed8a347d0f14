"""What has no sums: element-wise chains, permutations, gathers, concatenations, padding."""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad, TensorRegion
from tvm.s_tir.schedule import SBlockRV

from tvmify.compiler.schedule.loops import (
    blocks_of,
    extent,
    fuse,
    is_injective,
    is_output,
    kinds,
    output_bits,
    parallel_if_worth,
)
from tvmify.compiler.schedule.microarchitecture import Microarchitecture
from tvmify.compiler.schedule.pieces import split_rows
from tvmify.compiler.schedule.rule import Rule
from tvmify.compiler.schedule.turning import must_stay, turn_operands


class Elementwise(Rule):
    """One pass per result, vectorised along memory. Any function at all can take this rule."""

    name = "elementwise"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Inline what can be inlined, then schedule each block that is left by itself."""
        inline_cheap(sch)
        work = total_work(sch)
        for block in blocks_of(sch):
            schedule_block(sch, block, machine, work)
        return sch


def inline_cheap(sch: s_tir.Schedule) -> None:
    """Inline the element-wise blocks, unless that would repeat their work.

    A block that calls a function is kept if its elements are read more than once: by two stages,
    as the exponential of a softmax, or by many elements, as a sigmoid broadcast over an image.
    """
    for block in blocks_of(sch):
        if not is_injective(sch, block) or is_output(sch, block):
            continue
        consumers = sch.get_consumers(block)
        widest = max(iterations(sch, consumer) for consumer in consumers)
        often = len(consumers) > 1 or widest > 2 * iterations(sch, block)
        if (often and calls_function(sch, block)) or nests_too_deep(sch, block):
            continue
        if must_stay(sch, block):
            continue
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:
            continue


def calls_function(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether the block computes an exponential or the like: tens of instructions an element."""
    return _calls_function(sch.get(block).body)


def nests_too_deep(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether a consumer, with this block inlined, would be too long an expression.

    What is read twice is written out twice, so that ``x = x + x / 2`` doubles with every line.
    And TVM's code generator writes every named value out again in those that follow, and our
    functions name many: the third within each other takes it a minute.
    """
    own = sch.get(block)
    length, _ = _written_out(own.body, None)
    for consumer in sch.get_consumers(block):
        rest, times = _written_out(sch.get(consumer).body, own.writes[0].source)
        if times * length > 1 and rest + times * length > _LONGEST:
            return True
    return False


def _written_out(node: object, tensor: tirx.Var | None) -> tuple[int, int]:
    """Return the length of an expression, or statement, and how often it reads a tensor."""
    if isinstance(node, TensorLoad):
        return 1, int(tensor is not None and node.source.same_as(tensor))
    parts = [getattr(node, name, None) for name in _PARTS]
    if isinstance(node, Call):
        parts += node.args
    below = [_written_out(part, tensor) for part in parts if part is not None]
    length, times = 1 + sum(part[0] for part in below), sum(part[1] for part in below)
    name = getattr(getattr(node, "op", None), "name", "")
    factor = _PER_FUNCTION if name.rpartition(".")[2] in _FUNCTIONS else 1
    return factor * length, factor * times


def _calls_function(node: object) -> bool:
    parts = [getattr(node, name, None) for name in _PARTS]
    if isinstance(node, Call):
        parts += node.args
    name = getattr(getattr(node, "op", None), "name", "")
    is_function = name.rpartition(".")[2] in _FUNCTIONS
    return is_function or any(_calls_function(part) for part in parts if part is not None)


#: How long an expression may be, for how many a function of it counts, and where expressions have
#: their operands. Beyond, LLVM takes seconds: 17 for ``x = x + x / 2``, sixteen
#: times, written out.
_LONGEST = 4000
_PER_FUNCTION = 20
_PARTS = ("value", "a", "b", "condition", "true_value", "false_value")
_FUNCTIONS = (
    "exp exp2 exp10 expm1 log log2 log10 log1p tanh sigmoid erf pow sin cos tan sinh cosh asin "
    "acos atan asinh acosh atanh atan2 rsqrt"
).split()


def total_work(sch: s_tir.Schedule) -> float:
    """Multiply-adds that a function is worth, counting a function call as twenty."""
    return sum(
        iterations(sch, block) * (20 if calls_function(sch, block) else 1)
        for block in blocks_of(sch)
    )


def iterations(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """How often the body of a block runs."""
    return prod(int(variable.dom.extent) for variable in sch.get(block).iter_vars)


def schedule_block(  # noqa: PLR0912
    sch: s_tir.Schedule, block: SBlockRV, machine: Microarchitecture, work: float
) -> None:
    """Make one block a nest of its own: parallel outside, one vector inside."""
    letters = kinds(sch, block)
    loops = sch.get_loops(block)
    if len(loops) != len(letters) or set(letters) - set("SR"):
        return
    spatial = [loop for loop, letter in zip(loops, letters, strict=True) if letter == "S"]
    reduced = [loop for loop, letter in zip(loops, letters, strict=True) if letter == "R"]
    if not spatial or turn_operands(sch, block, machine, work):
        return
    if split_rows(sch, block, machine, work):
        return
    together = contiguous_axes(sch, block)
    sch.reorder(*spatial, *reduced)
    inner = fuse(sch, spatial[len(spatial) - together :])
    outer = spatial[: len(spatial) - together]
    lanes = machine.lanes(output_bits(sch, block))
    vector, several = None, []
    if extent(sch, inner) >= lanes:
        inner, vector = sch.split(inner, [None, lanes])
        if reduced:
            # Several vectors of sums stay in registers: one alone waits for its own additions, and
            # takes one cache line of each row.
            width = next(n for n in (8, 4, 2, 1) if extent(sch, inner) % n == 0)
            inner, *several = sch.split(inner, [None, width])
        outer = [*outer, inner]
    elif extent(sch, inner) * 2 >= lanes or not outer:
        vector = inner
    else:
        outer = [*outer, inner]
    if outer:
        whole = fuse(sch, outer)
        parallel_if_worth(sch, whole, machine, work)
        if extent(sch, whole) <= _UNROLLED and _is_guarded(sch, block) and not reduced:
            sch.unroll(whole)  # then each condition is known
    if reduced and vector is not None:
        sch.reorder(*reduced, *several, vector)
    for loop in several:
        sch.unroll(loop)
    if vector is not None:
        sch.vectorize(vector)
    if reduced:
        initial = sch.decompose_reduction(block, sch.get_loops(block)[1 if outer else 0])
        loops = sch.get_loops(initial)
        if vector is not None and loops:
            sch.vectorize(loops[-1])
            for loop in loops[-1 - len(several) : -1]:
                sch.unroll(loop)


#: Short loops over conditions, as of a concatenation of many small parts, are unrolled. Enough
#: for the 27 parts of DLRM's; nothing longer was measured.
_UNROLLED = 128


def _is_guarded(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    return "if_then_else" in str(sch.get(block).body)


def contiguous_axes(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """How many trailing spatial axes can be one: memory runs on through them in every tensor.

    At least one. A tensor counts when it is indexed by exactly these axes at its end, whole, or by
    none of them.
    """
    body = sch.get(block)
    axes = [v for v in body.iter_vars if int(v.iter_type) == tirx.IterVar.DataPar]
    count = len(axes)
    for region in [*body.reads, *body.writes]:
        while count > 1 and not _runs_through(region, axes[-count:]):
            count -= 1
    return count


def _runs_through(region: TensorRegion, axes: list[tirx.IterVar]) -> bool:
    index = [(r.min, r.extent) for r in region.region]
    used = [_mentions(minimum, axes) for minimum, _ in index]
    if not any(used):
        return True
    if len(index) < len(axes) or any(used[: len(index) - len(axes)]):
        return False
    shape = [int(size) for size in region.source.ty.shape]
    for i, axis in enumerate(axes):
        position = len(index) - len(axes) + i
        minimum, size = index[position]
        if not isinstance(size, tirx.IntImm) or int(size) != 1 or not minimum.same_as(axis.var):
            return False
        if i > 0 and shape[position] != int(axis.dom.extent):
            return False
    return True


def _mentions(expression: object, axes: list[tirx.IterVar]) -> bool:
    text = str(expression)
    return any(axis.var.name in text for axis in axes)
