"""Load nearby elements as vectors and shuffle them, where TVM loads lane by lane. TVM makes vector
loads of consecutive elements only: every second element, each one twice, or a reversed row take
sixteen loads and as many insertions. Where all lanes lie close together, at constant distances, one
or two vectors contain them, and a shuffle selects them.
"""

from __future__ import annotations

from tvm import sym, tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import DIVISIONS, collect, rewrite_body, substitute
from tvmify.compiler.kernels.elementwise.shuffles import SHUFFLES
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.sizes import factor, product

#: Shorter vectors gain nothing.
_FEWEST_LANES = 4


@compiler_pass
class ShuffleLoads:
    """Rewrite the loads of marked functions; runs on flat buffers."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if SHUFFLES not in function.attrs:
            return function
        return rewrite_body(function, _Shuffling().visit)


class _Shuffling:
    """Walks the statements of a function in order.

    Attributes
    ----------
    named
        Values of variables, into which TVM puts common parts of indices.
    """

    def __init__(self) -> None:
        self.analyzer = sym.Analyzer()
        self.named: dict[tirx.Var, Expr] = {}

    def visit(self, stmt: Stmt) -> Stmt | None:
        """Rewrite the loads of a vector that is stored."""
        if isinstance(stmt, tirx.Bind):
            # Unrolled code rebinds its variables, sometimes to a number.
            self.named.pop(stmt.var, None)
            if isinstance(stmt.value, _ARITHMETIC) and not _divides_by_size(stmt.value):
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
        while len(vectors) * windows[0][1] < lanes:  # no more lanes than a Shuffle takes
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
        """Return one lane of a vector of indices; None if it is not plain arithmetic."""
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
    """Cover elements by vectors of one width; return their offsets from the first element. Nothing
    outside the tensor is read: either the vectors begin and end with the elements, or they are
    among those that the whole tensor consists of.
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
    tirx.Div: tirx.truncdiv,
    tirx.Mod: tirx.truncmod,
}
_ARITHMETIC = (*_OPERATIONS, tirx.Ramp, tirx.Broadcast, tirx.IntImm, tirx.Var)


def _divides_by_size(value: Expr) -> bool:
    """Whether a quotient has a divisor that varies: its variable is kept, not to divide again."""
    divisors = [node.b for node in collect(value, DIVISIONS)]
    return not all(
        isinstance(divisor.value if isinstance(divisor, tirx.Broadcast) else divisor, tirx.IntImm)
        for divisor in divisors
    )


def _is(value: Expr, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def _lanes(value: Expr) -> int:
    _, _, lanes = str(value.ty.dtype).partition("x")
    return int(lanes or 1) if lanes.isdigit() or not lanes else 1
