"""Let the vectors of a row have consecutive indices, where the row consists of several axes.

TVM finds the axes of place ``e = 16 f + l`` of such a row by division. For rows of 56 × 56, the
index becomes ``(2 f + l // 8) // 7 % 56 * 56 + (16 f + l) % 56``, since each division is simplified
by itself, and no longer as a whole: a vector is then sixteen loads. Written with `e`, it is `e`.
"""

from __future__ import annotations

from tvm import sym, tirx
from tvm.ir import Expr, Range, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import (
    collect,
    rewrite,
    rewrite_body,
    substitute,
    uses,
    with_loop_body,
)
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class JoinIndices:
    """Rewrite the indices of loads and stores in vectorized loops; runs on flat buffers."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _Joining().visit)


class _Joining:
    """Walks the statements of a function in order.

    Attributes
    ----------
    extents
        Of the loops so far that begin at zero, those that are numbers.
    """

    def __init__(self) -> None:
        self.analyzer = sym.Analyzer()
        self.extents: dict[tirx.Var, int] = {}

    def visit(self, stmt: Stmt) -> Stmt | None:
        """Rewrite a vectorized loop."""
        if not isinstance(stmt, tirx.For):
            return None
        self.extents.pop(stmt.loop_var, None)
        if not all(isinstance(bound, tirx.IntImm) for bound in (stmt.min, stmt.extent)):
            return None
        begins_at_zero = int(stmt.min) == 0
        if stmt.kind != tirx.ForKind.VECTORIZED:
            self.analyzer.bind(stmt.loop_var, Range.from_min_extent(stmt.min, stmt.extent), True)
            if begins_at_zero:
                self.extents[stmt.loop_var] = int(stmt.extent)
            return None
        if not begins_at_zero:
            return None

        def of_vector(inner: Stmt) -> Stmt | None:
            if not isinstance(inner, tirx.BufferStore):
                return None
            indices = [self._joined(index, stmt) for index in inner.indices]
            value = substitute(inner.value, lambda node: self._load(node, stmt))
            return tirx.BufferStore(inner.buffer, value, indices)

        return with_loop_body(stmt, rewrite(stmt.body, of_vector))

    def _load(self, node: Expr, vector: tirx.For) -> Expr | None:
        if not isinstance(node, TensorLoad):
            return None
        return tirx.BufferLoad(node.source, [self._joined(index, vector) for index in node.indices])

    def _joined(self, index: Expr, vector: tirx.For) -> Expr:
        """Return an index without divisions, if it is a sum of a place in the row and others."""
        lane, lanes = vector.loop_var, int(vector.extent)
        if not uses(index, [lane]) or not _divides(index, [lane]):
            return index
        for number in tirx.analysis.undefined_vars(index, []):
            dtype = str(number.ty.dtype)
            if number not in self.extents or dtype != str(lane.ty.dtype):
                continue
            count, width = (tirx.const(n, dtype) for n in (self.extents[number] * lanes, lanes))
            place = tirx.Var("place", dtype)
            self.analyzer.bind(place, Range(tirx.const(0, dtype), count))
            parts = {number: tirx.floordiv(place, width), lane: tirx.floormod(place, width)}
            whole = self.analyzer.simplify(substitute(index, parts.get))
            if not _divides(whole, [place]):
                return substitute(whole, {place: number * width + lane}.get)
        return index


def _divides(index: Expr, variables: list[tirx.Var]) -> bool:
    """Whether a quotient or remainder depends on a variable."""
    return any(uses(part, variables) for part in collect(index, (tirx.FloorDiv, tirx.FloorMod)))
