"""Loops around vectors of which the last are incomplete: whole iterations run without conditions.
Otherwise each vector of a sum would check whether the row ends within it, and no sum would stay in
a register.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.bounds import at, conjunction, conjuncts
from tvmify.compiler.kernels.common.rewriting import (
    rewrite,
    uses,
    with_loop_body,
    with_new_variables,
)


class _Bound(NamedTuple):
    """A condition ``first + inner < end``, where the inner loops add at most `span`."""

    condition: Expr
    first: Expr
    span: int

    @property
    def always(self) -> Expr:
        """The condition for all inner iterations."""
        return self.first + self.span < self.condition.b


@dataclass
class _Nest:
    """The loops inside a loop, and the conditions of each block in them."""

    loops: list[tirx.For] = field(default_factory=list)
    blocks: list[list[Expr]] = field(default_factory=list)

    def add(self, stmt: Stmt) -> bool:
        """Add what a statement consists of; return whether it is only loops around blocks."""
        if isinstance(stmt, tirx.SeqStmt):
            return all(map(self.add, stmt.seq))
        if isinstance(stmt, tirx.For):
            self.loops.append(stmt)
            return self.add(stmt.body)
        if not isinstance(stmt, s_tir.SBlockRealize):
            return False
        self.blocks.append(conjuncts(stmt.predicate))
        return isinstance(stmt.block.body, tirx.BufferStore)

    def bounds(self, variable: tirx.Var) -> list[_Bound]:
        """Return the conditions that depend on a loop variable and on loops inside, if each block
        has some, lanes of vectors are among these loops, and an end is symbolic.

        Conditions of a serial loop inside are left to that.
        """
        lanes = [loop.loop_var for loop in self.loops if loop.kind == tirx.ForKind.VECTORIZED]
        found: list[_Bound] = []
        for conditions in self.blocks:
            among = [c for c in conditions if isinstance(c, tirx.LT) and uses(c.a, [variable])]
            own = [bound for condition in among if (bound := self._bound(condition)) is not None]
            if not own:
                return []
            found += own
        ends = (b.condition for b in found if uses(b.condition.a, lanes))
        return [] if all(sizes.is_static(condition.b) for condition in ends) else found

    def _bound(self, condition: Expr) -> _Bound | None:
        first, span = condition.a, 0
        for loop in self.loops:
            if not uses(condition.a, [loop.loop_var]):
                continue
            start, second = (at(first, loop.loop_var, i) for i in range(2))
            step = sym.Analyzer().simplify(second - start)
            is_known = sizes.is_static(step, loop.extent, loop.min) and int(step) >= 0
            if not is_known or loop.kind == tirx.ForKind.SERIAL:
                return None
            first, span = start, span + int(step) * (int(loop.extent) - 1)
        return _Bound(condition, first, span) if span else None


def whole_first(loop: tirx.For, visit: Callable[[Stmt], Stmt | None]) -> Stmt | None:
    """Divide a loop at the ends of rows, and rewrite what is inside; None if it has none.

    A serial loop becomes one over whole iterations and one over the rest; in one that threads
    share, each iteration tells.
    """
    nest = _Nest()
    if not nest.add(loop.body) or not (bounds := nest.bounds(loop.loop_var)):
        return None
    if loop.kind == tirx.ForKind.PARALLEL and len(nest.loops) == 1:
        return None  # a single vector checks this anyway
    whole = rewrite(_without(loop.body, bounds), visit)
    if loop.kind == tirx.ForKind.PARALLEL:
        is_whole = conjunction([bound.always for bound in _distinct(bounds)])
        rest = rewrite(with_new_variables(loop.body), visit)
        return with_loop_body(loop, tirx.IfThenElse(is_whole, whole, rest))
    counts = _counts(bounds, loop)
    if counts is None:
        return None
    count, end = counts
    number = tirx.Var(f"{loop.loop_var.name}_rest", loop.loop_var.ty)
    rest = rewrite(with_new_variables(loop.body, {loop.loop_var: number + count}), visit)
    return tirx.SeqStmt(
        [
            tirx.For(loop.loop_var, loop.min, count, loop.kind, whole),
            tirx.For(number, loop.min, end - count, loop.kind, rest),
        ]
    )


def _distinct(bounds: list[_Bound]) -> list[_Bound]:
    return list({str(bound.always): bound for bound in bounds}.values())


def _counts(bounds: list[_Bound], loop: tirx.For) -> tuple[Expr, Expr] | None:
    """Return how many iterations of a serial loop are whole, and where the rest ends, or None.

    All blocks inside have one of the conditions, so the rest ends where none of them holds.
    """
    if not sizes.is_static(loop.min) or int(loop.min) != 0:
        return None
    analyzer = sym.Analyzer()
    count: Any = None
    end: Any = None
    for bound in _distinct(bounds):
        start, second = (at(bound.first, loop.loop_var, i) for i in range(2))
        step = analyzer.simplify(second - start)
        if not sizes.is_static(step) or int(step) <= 0:
            return None
        whole, last = (
            _at_most(tirx.floordiv(bound.condition.b - start - span - 1, int(step)) + 1, loop)
            for span in (bound.span, 0)
        )
        count = whole if count is None else tirx.min(whole, count)
        end = last if end is None else tirx.max(last, end)
    return None if count is None else (count, end)


def _at_most(count: Expr, loop: tirx.For) -> Expr:
    """Return a number of iterations that is neither negative nor more than a loop has."""
    bounded: Any = sym.Analyzer().simplify(count)
    if not sizes.proved(bounded >= 0):
        bounded = tirx.max(bounded, 0)
    return bounded if sizes.proved(bounded <= loop.extent) else tirx.min(bounded, loop.extent)


def _without(body: Stmt, bounds: list[_Bound]) -> Stmt:
    """Return loops whose blocks lack some conditions."""
    texts = {str(bound.condition) for bound in bounds}

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, s_tir.SBlockRealize):
            return None
        left = [c for c in conjuncts(stmt.predicate) if str(c) not in texts]
        return s_tir.SBlockRealize(stmt.iter_values, conjunction(left), stmt.block)

    return rewrite(body, visit)
