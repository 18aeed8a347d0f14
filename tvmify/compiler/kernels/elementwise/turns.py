"""Positions in a row at which a condition changes, as at borders and in concatenations."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tvm import s_tir, sym, tirx
from tvm.ir import Call, Expr, TensorLoad
from tvm_ffi import StructuralKey

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.rewriting import collect, is_if_then_else, substitute, uses
from tvmify.compiler.sizes import Size

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


class _Turn(NamedTuple):
    """A condition has one result before a place in the row, and the other from there on."""

    first: bool
    place: Size


@dataclass(frozen=True)
class Pieces:
    """The pieces of a row in which conditions on the place are constant.

    Attributes
    ----------
    edges
        Where each piece begins; then, where the row ends.
    turns
        By condition: its result in the first piece, and the first piece where it has the other.
    """

    edges: list[Size]
    turns: dict[Expr, tuple[bool, int]]

    def __iter__(self) -> Iterator[tuple[Size, Size]]:
        """Yield where each piece begins, and how long it is."""
        for start, end in pairwise(self.edges):
            yield start, sizes.simplified(end - start)

    def left(self, condition: Expr, piece: int) -> Expr | bool:
        """Return the result of a condition in a piece, or the part of it that is not known."""
        if isinstance(condition, (tirx.And, tirx.Or)):
            decisive = isinstance(condition, tirx.Or)
            a, b = self.left(condition.a, piece), self.left(condition.b, piece)
            if a is decisive or b is decisive:
                return decisive
            if isinstance(a, bool):
                return b
            if isinstance(b, bool):
                return a
            is_same = a.same_as(condition.a) and b.same_as(condition.b)
            return condition if is_same else type(condition)(a, b)
        if condition not in self.turns:
            return condition
        first, turned = self.turns[condition]
        return first == (piece < turned)


def pieces_of(block: s_tir.SBlock) -> Pieces:
    """Return the pieces of the rows of a block; one if their order is unknown."""
    length = sizes.number_or_expression(block.iter_vars[-1].dom.extent)
    inside: list[Size] = []
    turns = _turns(block, length)
    for turn in turns.values():
        if not any(sizes.same(turn.place, edge) for edge in (0, *inside, length)):
            number = _number(turn.place, inside)
            if number is None:
                return Pieces([0, length], {})
            inside.insert(number, turn.place)
    edges = [0, *inside, length]

    def piece(place: Size) -> int:
        return next(i for i, edge in enumerate(edges) if sizes.same(edge, place))

    return Pieces(edges, {c: (turn.first, piece(turn.place)) for c, turn in turns.items()})


def _number(place: Size, edges: list[Size]) -> int | None:
    """Return before which of some edges in order a place is; None if that is unknown."""
    for number, edge in enumerate(edges):
        if sizes.holds(place <= edge):
            return number
        if not sizes.holds(edge <= place):
            return None
    return len(edges)


def _turns(block: s_tir.SBlock, length: Size) -> dict[Expr, _Turn]:
    """Find where each condition on the last axis turns; none if one depends on other axes, too."""
    *others, last = (axis.var for axis in block.iter_vars)
    turns: dict[Expr, _Turn] = {}
    # A condition may occur several times.
    known: dict[StructuralKey, _Turn | None] = {}
    for condition in _comparisons(block.body.value):
        if not uses(condition, [last]):
            continue
        if collect(condition, TensorLoad):
            continue  # of values
        if uses(condition, others) or collect(condition, tirx.FloorMod):
            return {}  # of more than the place in the row
        key = StructuralKey(condition)
        if key not in known:
            known[key] = _turn(condition, last, length)
        if (turn := known[key]) is not None:
            turns[condition] = turn
    return turns


def _comparisons(value: Expr) -> list[Expr]:
    found: list[Expr] = []

    def split(condition: Expr) -> None:
        if isinstance(condition, (tirx.And, tirx.Or)):
            split(condition.a)
            split(condition.b)
        elif type(condition) in _COMPARISONS:
            found.append(condition)

    for node in collect(value, (tirx.Select, Call)):
        if isinstance(node, tirx.Select):
            split(node.condition)
        elif is_if_then_else(node):
            split(node.args[0])
    return found


def _turn(condition: Expr, axis: tirx.Var, length: Size) -> _Turn | None:
    """Return where a condition turns, if it turns once."""
    if not _turns_once(condition, axis):
        return None
    if isinstance(length, int) and all(
        variable.same_as(axis) for variable in tirx.analysis.undefined_vars(condition, [])
    ):
        return _turn_by_trial(condition, axis, length)
    return _turn_of_sizes(condition, axis, length)


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


def _turn_by_trial(condition: Expr, axis: tirx.Var, length: int) -> _Turn:
    """Find the first place where a comparison has another result than at the start."""
    a, b = condition.a, condition.b
    compare = _COMPARISONS[type(condition)]

    def at(place: int) -> bool:
        # Most conditions compare the place itself, for which an analyzer would be slow.
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


def _turn_of_sizes(condition: Expr, axis: tirx.Var, length: Size) -> _Turn | None:
    """Solve a comparison that is linear in the place, and contains symbols."""
    a, b = condition.a, condition.b
    if isinstance(condition, (tirx.GT, tirx.GE)):
        a, b = b, a
    parts = sym.detect_linear_equation(a - b, [axis])
    if not parts or not sizes.is_static(parts[0]):
        return None
    slope, start = int(parts[0]), parts[1]
    if isinstance(condition, (tirx.LE, tirx.GE)):
        start = start - 1
    # It holds where `slope * place + start` is negative.
    if slope > 0:
        place = sizes.simplified(tirx.floordiv(slope - 1 - start, slope))
    else:
        place = sizes.simplified(tirx.floordiv(start, -slope) + 1)
    if not sizes.holds(place >= 0):
        place = tirx.max(place, 0)
    if not sizes.holds(place <= length):
        place = tirx.min(place, length)
    return _Turn(slope > 0, place)
