"""Read neighbours as vectors and put them in order, where TVM reads one lane after the other.

TVM makes a vector load of consecutive elements alone: every second one, each of them twice or the
row from its end are sixteen loads and as many insertions. Where all lanes lie close together, at
distances that are known, one or two vectors hold them, and a shuffle takes them out.
"""

from __future__ import annotations

from tvm import sym, tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import rewrite_body, substitute
from tvmify.compiler.kernels.elementwise.shuffles import SHUFFLES
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.sizes import factor, product

#: Shorter vectors gain nothing.
_FEWEST_LANES = 4


@compiler_pass
class ShuffleLoads:
    """Rewrite the loads of functions that are marked; runs where buffers are flat."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if SHUFFLES not in function.attrs:
            return function
        return rewrite_body(function, _Shuffling().visit)


class _Shuffling:
    """Goes through the statements of a function, in order.

    Attributes
    ----------
    named
        Values of variables: TVM names what several indices have in common.
    """

    def __init__(self) -> None:
        self.analyzer = sym.Analyzer()
        self.named: dict[tirx.Var, Expr] = {}

    def visit(self, stmt: Stmt) -> Stmt | None:
        """Rewrite the loads of a vector that is stored."""
        if isinstance(stmt, tirx.Bind):
            # What was unrolled binds its variables again, to a number at times.
            self.named.pop(stmt.var, None)
            if isinstance(stmt.value, _ARITHMETIC):
                self.named[stmt.var] = substitute(stmt.value, self._value)
        if not isinstance(stmt, tirx.BufferStore) or _lanes(stmt.value) < _FEWEST_LANES:
            return None
        return tirx.BufferStore(stmt.buffer, substitute(stmt.value, self._shuffled), stmt.indices)

    def _shuffled(self, load: Expr) -> Expr | None:
        if not isinstance(load, TensorLoad) or len(load.indices) != 1:
            return None
        (index,), lanes = load.indices, _lanes(load)
        # One index of many lanes: an element of the tensor is a vector.
        if not _FEWEST_LANES <= lanes == _lanes(index):
            return None
        if isinstance(index, tirx.Ramp) and _is(index.stride, 1):
            return None
        first = self._lane(index, 0)
        offsets = [self._distance(index, first, i) for i in range(lanes)]
        known = [offset for offset in offsets if offset is not None]
        if first is None or len(known) < lanes:
            return None
        start = self.analyzer.simplify(substitute(first + min(known), self._value))
        span = max(known) - min(known) + 1
        whole = factor(product(load.source.ty.shape)) % lanes == 0
        windows = _windows(self.analyzer.modular_set(start), span, lanes, whole)
        vectors, places = [], {}
        for begin, width in windows:
            for i in range(width):
                places.setdefault(begin + i, len(vectors) * width + i)
            ramp = tirx.Ramp(self.analyzer.simplify(start + begin), tirx.const(1, "int32"), width)
            vectors.append(tirx.BufferLoad(load.source, [ramp]))
        if not vectors:
            return None
        while len(vectors) * windows[0][1] < lanes:  # a Shuffle returns no more than it has
            vectors.append(vectors[-1])
        order = [places[offset - min(known)] for offset in known]
        return tirx.Shuffle(vectors, [tirx.const(place, "int32") for place in order])

    def _value(self, node: Expr) -> Expr | None:
        return self.named.get(node) if isinstance(node, tirx.Var) else None

    def _distance(self, index: Expr, first: Expr | None, lane: int) -> int | None:
        this = self._lane(index, lane)
        if this is None or first is None:
            return None
        distance = self.analyzer.simplify(this - first)
        return int(distance) if isinstance(distance, tirx.IntImm) else None

    def _lane(self, index: Expr, lane: int) -> Expr | None:
        """Return one lane of a vector of indices; None if it is more than arithmetic."""
        if isinstance(index, tirx.Var):
            index = self.named.get(index, index)
        if isinstance(index, tirx.Ramp):
            return index.base + index.stride * lane
        if isinstance(index, tirx.Broadcast):
            return index.value
        if _lanes(index) == 1:
            return index
        if type(index) not in _OPERATIONS:
            return None
        a, b = self._lane(index.a, lane), self._lane(index.b, lane)
        return None if a is None or b is None else _OPERATIONS[type(index)](a, b)


def _windows(
    begins: sym.ModularSet, span: int, lanes: int, consists_of_vectors: bool
) -> list[tuple[int, int]]:
    """Cover elements by vectors of one width: where each begins, relative to the first element.

    None is read that the tensor does not have: either vectors begin and end with the elements, or
    they are those that the whole tensor consists of.
    """
    whole = consists_of_vectors and int(begins.coeff) % lanes == 0
    before = int(begins.base) % lanes
    if whole and before + span <= lanes:
        return [(-before, lanes)]
    if span > 2 * lanes or span < 2:
        return []
    width = min(lanes, 1 << (span.bit_length() - 1))
    return [(0, width)] if width == span else [(0, width), (span - width, width)]


_OPERATIONS = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: tirx.floordiv,
    tirx.FloorMod: tirx.floormod,
}


_ARITHMETIC = (*_OPERATIONS, tirx.Ramp, tirx.Broadcast, tirx.IntImm, tirx.Var)


def _is(value: Expr, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def _lanes(value: Expr) -> int:
    _, _, lanes = str(value.ty.dtype).partition("x")
    return int(lanes or 1) if lanes.isdigit() or not lanes else 1
