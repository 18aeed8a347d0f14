"""Tails of vectorized loops: full vectors where they fit, then smaller ones for the rest. TVM
generates scalar code for a vectorized loop whose predicate depends on the lane. Splitting off the
case that all lanes are valid keeps full vectors; the rest has a constant length and is split into
vectors of half, a quarter … of the width.
"""

from __future__ import annotations

from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.bounds import has_symbols, size_of, written
from tvmify.compiler.kernels.common.rewriting import (
    rewrite_body,
    with_loop_body,
    with_new_variables,
)
from tvmify.compiler.sizes import Size

#: Annotation of a block of partial sums: how long the row is.
_BOUND = "tvmify.row_length"


def remember_bound(sch: s_tir.Schedule, partial: SBlockRV, length: Size) -> None:
    """Annotate a block of partial sums, just made by `rfactor`, with the length of the row.

    TVM's ``compute_at`` drops a block's predicate, here "this lane is still in the row", and the
    sums would run past the end. `split_tails` puts it back.
    """
    sch.annotate(partial, _BOUND, written(length))


def split_tails(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with the tail of every vectorized loop split off."""
    is_symbolic = has_symbols(function)

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or stmt.kind != tirx.ForKind.VECTORIZED:
            return None
        if not isinstance(stmt.body, s_tir.SBlockRealize):
            return None
        split = _split(stmt, stmt.body, function)
        if is_symbolic and isinstance(split, tirx.IfThenElse) and split.else_case is not None:
            # `ConvertSSA` does not find all that both define.
            return tirx.IfThenElse(
                split.condition, split.then_case, with_new_variables(split.else_case)
            )
        return split

    return rewrite_body(function, visit)


def _split(loop: tirx.For, realize: s_tir.SBlockRealize, function: tirx.PrimFunc) -> Stmt:
    lane, lanes = loop.loop_var, int(loop.extent)
    of_lane, of_others = [], []
    predicate = _with_bound(realize, function)
    # Predicates come from splits: once false for a lane they are false for all that follow.
    for condition in _conjuncts(predicate):
        first = _at(condition, lane, 0)
        if str(first) == str(_at(condition, lane, lanes - 1)):
            of_others.append(first)
        else:
            of_lane.append(condition)
    other = _conjunction(of_others)
    if not of_lane:
        return with_loop_body(loop, s_tir.SBlockRealize(realize.iter_values, other, realize.block))
    full = _conjunction([_at(c, lane, lanes - 1) for c in of_lane])
    vector = with_loop_body(loop, s_tir.SBlockRealize(realize.iter_values, other, realize.block))
    rest = _rest(of_lane, lane, lanes)
    if rest == 0:  # whole vectors only
        return tirx.IfThenElse(full, vector, None)
    if rest is None:  # not a plain upper bound: the predicate stays, and lanes run one by one
        one = s_tir.SBlockRealize(realize.iter_values, predicate, realize.block)
        tail: Stmt = tirx.For(lane, loop.min, loop.extent, tirx.ForKind.SERIAL, one)
        return tirx.IfThenElse(full, vector, tail)
    tail = _narrower(loop, realize, other, rest)
    begins = _conjunction([_at(c, lane, 0) for c in of_lane])
    if not isinstance(begins, tirx.IntImm):
        tail = tirx.IfThenElse(begins, tail, None)
    return tirx.IfThenElse(full, vector, tail)


def _narrower(loop: tirx.For, realize: s_tir.SBlockRealize, predicate: Expr, count: int) -> Stmt:
    """Return the first lanes of a vectorized loop as vectors of half its width, and smaller."""
    lane = loop.loop_var
    pieces: list[Stmt] = []
    start, width = 0, int(loop.extent)
    while start < count:
        width //= 2
        if start + width > count:
            continue
        inner = tirx.Var(f"{lane.name}_{width}", str(lane.ty.dtype))
        values = [_at(value, lane, inner + start) for value in realize.iter_values]
        pieces.append(
            tirx.For(
                inner,
                loop.min,
                tirx.const(width, str(lane.ty.dtype)),
                tirx.ForKind.VECTORIZED if width > 1 else tirx.ForKind.UNROLLED,
                s_tir.SBlockRealize(values, predicate, realize.block),
            )
        )
        start += width
    return tirx.SeqStmt(pieces) if len(pieces) > 1 else pieces[0]


def _with_bound(realize: s_tir.SBlockRealize, function: tirx.PrimFunc) -> Expr:
    block = realize.block
    kinds = [int(variable.iter_type) for variable in block.iter_vars]
    if _BOUND not in block.annotations or tirx.IterVar.CommReduce not in kinds:
        return realize.predicate
    # The lane comes first among the variables of such a block. Its step along the row is the one
    # sum; axes of one element are others, which TVM leaves out of the loops that it fuses.
    width = block.iter_vars[0].dom.extent
    (step,) = (
        value
        for value, variable, kind in zip(realize.iter_values, block.iter_vars, kinds, strict=True)
        if kind == tirx.IterVar.CommReduce and not sizes.is_one(variable.dom.extent)
    )
    within = step * width + realize.iter_values[0] < size_of(block.annotations[_BOUND], function)
    return _conjunction([*_conjuncts(realize.predicate), within])


def _rest(conditions: list[Expr], lane: tirx.Var, lanes: int) -> int | None:
    """The number of lanes of the last, incomplete vector, if it is constant."""
    if len(conditions) != 1 or not isinstance(conditions[0], tirx.LT):
        return None
    index, bound = conditions[0].a, conditions[0].b
    if not isinstance(bound, tirx.IntImm):
        return None
    analyzer = sym.Analyzer()
    start = _at(index, lane, 0)
    steps = analyzer.simplify(_at(index, lane, 1) - start)
    if not (isinstance(steps, tirx.IntImm) and int(steps) == 1):
        return None
    aligned = analyzer.modular_set(start)
    if int(aligned.coeff) % lanes or int(aligned.base) % lanes:
        return None
    return int(bound) % lanes


def _at(expression: Expr, variable: tirx.Var, value: object) -> Expr:
    analyzer = sym.Analyzer()
    if isinstance(value, int):
        value = tirx.const(value, str(variable.ty.dtype))
    analyzer.bind(variable, value)
    return analyzer.simplify(expression)


def _conjuncts(predicate: Expr) -> list[Expr]:
    if isinstance(predicate, tirx.And):
        return _conjuncts(predicate.a) + _conjuncts(predicate.b)
    return [predicate]


def _conjunction(conditions: list[Expr]) -> Expr:
    result: Expr = tirx.const(1, "bool")
    for condition in conditions:
        result = tirx.all(result, condition) if not isinstance(result, tirx.IntImm) else condition
    return result
