"""Read neighbours as vectors and put them in order, where TVM reads one lane after the other.

TVM makes a vector load of consecutive elements alone: every second one, each of them twice or the
row from its end are sixteen loads and as many insertions. Where all lanes lie close together, at
distances that are known, one or two vectors hold them, and a shuffle takes them out.
"""

from __future__ import annotations

import tvm
from tvm import sym, tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.schedule.chain import substitute
from tvmify.compiler.schedule.loops import element_count
from tvmify.compiler.schedule.rewriting import rewrite_body
from tvmify.compiler.schedule.shuffles import SHUFFLES

#: Shorter vectors gain nothing.
_FEWEST_LANES = 4


@tirx.transform.prim_func_pass(opt_level=0, name="ShuffleLoads")
class ShuffleLoads:
    """Rewrite the loads of functions that are marked; runs where buffers are flat."""

    def transform_function(
        self, function: tirx.PrimFunc, _: tvm.IRModule, __: object
    ) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit) if SHUFFLES in function.attrs else function


def _visit(stmt: Stmt) -> Stmt | None:
    if not isinstance(stmt, tirx.BufferStore) or _lanes(stmt.value) < _FEWEST_LANES:
        return None
    return tirx.BufferStore(stmt.buffer, substitute(stmt.value, _shuffled), stmt.indices)


def _shuffled(load: Expr) -> Expr | None:
    if not isinstance(load, TensorLoad) or len(load.indices) != 1:
        return None
    (index,), lanes = load.indices, _lanes(load)
    if lanes < _FEWEST_LANES or (isinstance(index, tirx.Ramp) and _is(index.stride, 1)):
        return None
    analyzer = sym.Analyzer()
    first = _lane(index, 0)
    distances = [_distance(analyzer, index, first, i) for i in range(lanes)]
    if first is None or any(distance is None for distance in distances):
        return None
    offsets = [int(distance) for distance in distances if distance is not None]
    start = analyzer.simplify(first + min(offsets))
    offsets = [offset - min(offsets) for offset in offsets]
    windows = _windows(analyzer, start, max(offsets) + 1, lanes, load.source)
    if windows is None:
        return None
    vectors, places = [], {}
    for begin, width in windows:
        for i in range(width):
            places.setdefault(begin + i, len(vectors) * width + i)
        ramp = tirx.Ramp(analyzer.simplify(start + begin), tirx.const(1, "int32"), width)
        vectors.append(tirx.BufferLoad(load.source, [ramp]))
    while len(vectors) * windows[0][1] < lanes:  # TVM's Shuffle returns no more than it is given
        vectors.append(vectors[-1])
    return tirx.Shuffle(vectors, [tirx.const(places[offset], "int32") for offset in offsets])


def _windows(
    analyzer: sym.Analyzer, start: Expr, span: int, lanes: int, source: tirx.Var
) -> list[tuple[int, int]] | None:
    """Cover elements by vectors of one width: where each begins, relative to the first element.

    None is read that the tensor does not have: either vectors begin and end with the elements, or
    they are those that the whole tensor consists of.
    """
    aligned = analyzer.modular_set(start)
    total = element_count(source.ty.shape)
    if int(aligned.coeff) % lanes == 0 and total % lanes == 0:
        before = int(aligned.base) % lanes
        if before + span <= lanes:
            return [(-before, lanes)]
    if span > 2 * lanes or span < 2:
        return None
    width = min(lanes, 1 << (span.bit_length() - 1))
    return [(0, width)] if width == span else [(0, width), (span - width, width)]


def _distance(analyzer: sym.Analyzer, index: Expr, first: Expr | None, lane: int) -> Expr | None:
    this = _lane(index, lane)
    if this is None or first is None:
        return None
    distance = analyzer.simplify(this - first)
    return distance if isinstance(distance, tirx.IntImm) else None


def _lane(index: Expr, lane: int) -> Expr | None:
    """Return one lane of a vector of indices; None if it is more than arithmetic."""
    if isinstance(index, tirx.Ramp):
        return index.base + index.stride * lane
    if isinstance(index, tirx.Broadcast):
        return index.value
    if _lanes(index) == 1:
        return index
    if not isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)):
        return None
    a, b = _lane(index.a, lane), _lane(index.b, lane)
    return None if a is None or b is None else _OPERATIONS[type(index)](a, b)


_OPERATIONS = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: tirx.floordiv,
    tirx.FloorMod: tirx.floormod,
}


def _is(value: Expr, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def _lanes(value: Expr) -> int:
    _, _, lanes = str(value.ty.dtype).partition("x")
    return int(lanes or 1) if lanes.isdigit() or not lanes else 1
