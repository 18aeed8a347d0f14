"""Rows that consist of pieces, such as borders and concatenations. In a vector that spans two
pieces, TVM evaluates conditions lane by lane. Here each piece gets its own loop, in which the
conditions are constant and vectors stay whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise

from tvm import s_tir, sym, tirx
from tvm.ir import Expr, TensorLoad
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.emission import vectors
from tvmify.compiler.kernels.common.loops import (
    extent,
    fuse,
    is_injective,
    output_bits,
    parallel_if_worth,
    traffic,
)
from tvmify.compiler.kernels.common.rewriting import (
    is_if_then_else,
    rewrite_body,
    substitute,
    uses,
    with_loop_body,
)
from tvmify.compiler.microarchitecture import Microarchitecture

#: DenseNet-201 concatenates 49 parts. More loops were not tried.
_MOST_PIECES = 64
#: Annotation of a row: lanes, whether threads share them, then the length of each piece.
_PIECES = "tvmify.pieces"
_COMPARISONS = {
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
}
#: What keeps the order of places, if one of its operands is a constant.
_MONOTONE = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.Min, tirx.Max, tirx.Cast),
    *(tirx.Var, tirx.IntImm, tirx.FloatImm),
)


def split_rows(
    sch: s_tir.Schedule, block: SBlockRV, machine: Microarchitecture, work: float
) -> bool:
    """Schedule a nest piece by piece if its rows consist of several; return whether they do.

    The block must be a nest of its own, one loop per axis.
    """
    *outer, row = sch.get_loops(block)
    lanes = machine.lanes(output_bits(sch, block))
    cuts = _worthwhile_cuts(sch, block, lanes)
    if not cuts or not outer:
        return False
    rows = fuse(sch, outer)
    parallel_if_worth(sch, rows, machine, work)
    # Threads share the vectors of a single row.
    shared = extent(sch, rows) == 1
    shared &= machine.worth_threads(work, traffic(sch.mod["main"], work))
    sch.annotate(row, _PIECES, [lanes, int(shared), *cuts])
    return True


def mark_pieces(sch: s_tir.Schedule, block: SBlockRV, row: LoopRV, lanes: int) -> bool:
    """Mark a whole row of a block, wherever that is computed, if it consists of pieces."""
    cuts = _worthwhile_cuts(sch, block, lanes)
    if not cuts or sum(cuts) != extent(sch, row):
        return False
    sch.annotate(row, _PIECES, [lanes, 0, *cuts])
    return True


def split_pieces(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split the rows that are marked: TVM's own partitions cannot be split further."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or _PIECES not in stmt.annotations:
            return None
        marks = stmt.annotations[_PIECES]
        lanes, shared, *lengths = (int(value) for value in marks)  # type: ignore[attr-defined]
        turns = _turns(stmt.body.block) or {}
        parts: list[Stmt] = []
        start = 0
        for length in lengths:
            rest = length % lanes
            piece = _decided(stmt, turns, start)
            if length > rest:
                parts.append(_vector(piece, start, lanes, length // lanes, bool(shared)))
            cuts = vectors(rest, lanes)
            parts += [_vector(piece, start + length - rest + at, width, 1) for at, width in cuts]
            start += length
        return tirx.SeqStmt(parts)

    return rewrite_body(function, visit)


def _vector(row: tirx.For, start: int, width: int, count: int, shared: bool = False) -> Stmt:
    """Return some vectors of a row, one after the other or in parallel."""
    dtype, realize = str(row.loop_var.ty.dtype), row.body
    number, lane = (tirx.Var(f"{row.loop_var.name}_{i}", dtype) for i in range(2))
    zero = tirx.const(0, dtype)
    place = lane + start if count == 1 else number * width + lane + start

    def at(expression: Expr) -> Expr:
        return substitute(expression, lambda node: place if node.same_as(row.loop_var) else None)

    values = [at(value) for value in realize.iter_values]
    body: Stmt = s_tir.SBlockRealize(values, at(realize.predicate), realize.block)
    kind = tirx.ForKind.VECTORIZED if width > 1 else tirx.ForKind.UNROLLED
    body = tirx.For(lane, zero, tirx.const(width, dtype), kind, body)
    if count == 1:
        return body
    kind = tirx.ForKind.PARALLEL if shared else tirx.ForKind.SERIAL
    return tirx.For(number, zero, tirx.const(count, dtype), kind, body)


def _worthwhile_cuts(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> list[int]:
    """Return the lengths of the pieces of a row; none if there is one, or too many, or all are
    short.
    """
    cuts = _cuts(sch, block)
    return cuts if 1 < len(cuts) <= _MOST_PIECES and max(cuts) >= lanes else []


def _cuts(sch: s_tir.Schedule, block: SBlockRV) -> list[int]:
    """Return the lengths of the pieces in which conditions on the last axis are constant."""
    body = sch.get(block)
    if not is_injective(sch, block) or not isinstance(body.body, tirx.BufferStore):
        return []
    if not sizes.is_static(body.iter_vars[-1].dom.extent):
        return []
    turns = _turns(body)
    if turns is None:
        return []
    length = int(body.iter_vars[-1].dom.extent)
    edges = [*sorted({0, *(turn.place for turn in turns.values())} - {length}), length]
    return [end - start for start, end in pairwise(edges)]


@dataclass(frozen=True)
class _Turn:
    """A condition has one result before a place in the row, and the other from there on."""

    first: bool
    place: int

    def at(self, place: int) -> bool:
        """The result at a place."""
        return self.first == (place < self.place)


def _turns(block: s_tir.SBlock) -> dict[Expr, _Turn] | None:
    """Find where each condition on the last axis turns; None if one depends on other axes, too."""
    last = block.iter_vars[-1].var
    length = int(block.iter_vars[-1].dom.extent)
    turns: dict[Expr, _Turn] = {}
    # A condition may occur several times.
    known: dict[str, _Turn] = {}
    for condition in _comparisons(block.body.value):
        if not uses(condition, [last]):
            continue
        text = str(condition)
        if "[" in text:
            continue  # of values
        known_with_place = all(v.same_as(last) for v in tirx.analysis.undefined_vars(condition, []))
        if not known_with_place or "%" in text:
            return None  # of more than the place in the row
        if not _turns_once(condition, last):
            continue
        if text not in known:
            known[text] = _turn(condition, last, length)
        turns[condition] = known[text]
    return turns


def _decided(row: tirx.For, turns: dict[Expr, _Turn], place: int) -> tirx.For:
    """Return the row with its conditions replaced by their results at a place. Otherwise each piece
    would contain the code of all others, and TVM's passes would take quadratic time.
    """
    realize = row.body
    block = realize.block
    if not realize.iter_values[-1].same_as(row.loop_var):
        return row

    def result(condition: Expr) -> bool | None:
        if isinstance(condition, (tirx.And, tirx.Or)):
            decisive = isinstance(condition, tirx.Or)
            sides = result(condition.a), result(condition.b)
            if decisive in sides:
                return decisive
            return None if None in sides else not decisive
        return turns[condition].at(place) if condition in turns else None

    def visit(node: Expr) -> Expr | None:
        if isinstance(node, tirx.Select):
            condition, yes, no = node.condition, node.true_value, node.false_value
        elif is_if_then_else(node):
            condition, yes, no = node.args
        else:
            return None
        decided = result(condition)
        return None if decided is None else substitute(yes if decided else no, visit)

    store = block.body
    value = substitute(store.value, visit)
    read = _tensors(value)
    inside = s_tir.SBlock(
        block.iter_vars,
        [region for region in block.reads if region.source in read],
        block.writes,
        block.name_hint,
        tirx.BufferStore(store.buffer, value, store.indices),
        annotations=block.annotations,
    )
    return with_loop_body(row, s_tir.SBlockRealize(realize.iter_values, realize.predicate, inside))


def _tensors(value: Expr) -> set[tirx.Buffer]:
    """Return the tensors that an expression reads."""
    found = set()

    def visit(node: Expr) -> Expr | None:
        if isinstance(node, TensorLoad):
            found.add(node.source)
        return None

    substitute(value, visit)
    return found


def _comparisons(value: Expr) -> list[Expr]:
    found: list[Expr] = []

    def split(condition: Expr) -> None:
        if isinstance(condition, (tirx.And, tirx.Or)):
            split(condition.a)
            split(condition.b)
        elif type(condition) in _COMPARISONS:
            found.append(condition)

    def visit(node: Expr) -> Expr | None:
        if isinstance(node, tirx.Select):
            split(node.condition)
        elif is_if_then_else(node):
            split(node.args[0])
        return None

    substitute(value, visit)
    return found


def _turns_once(condition: Expr, axis: tirx.Var) -> bool:
    """Whether both sides of a comparison only rise or only fall along an axis. One that contains
    another condition need not: a border of zeros around ones rises and falls.
    """
    uses_of_axis, others = [], []

    def visit(node: Expr) -> Expr | None:
        if node.same_as(axis):
            uses_of_axis.append(node)
        elif not isinstance(node, (*_COMPARISONS, *_MONOTONE)):
            others.append(node)
        return None

    substitute(condition, visit)
    return len(uses_of_axis) == 1 and not others


def _turn(condition: Expr, axis: tirx.Var, length: int) -> _Turn:
    """Find the first place where a comparison has another result than at the start."""
    a, b = condition.a, condition.b
    compare = _COMPARISONS[type(condition)]

    def at(place: int) -> bool:
        # Most conditions compare the place itself; an analyzer would take 20 times as long.
        if a.same_as(axis) and isinstance(b, tirx.IntImm):
            return compare(place, int(b))
        if b.same_as(axis) and isinstance(a, tirx.IntImm):
            return compare(int(a), place)
        analyzer = sym.Analyzer()
        analyzer.bind(axis, tirx.const(place, str(axis.ty.dtype)))
        return bool(analyzer.simplify(condition))

    first, low, high = at(0), 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) == first else (low, middle)
    return _Turn(first, high)
