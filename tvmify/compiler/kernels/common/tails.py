"""Tails of vectorized loops: full vectors where they fit, then smaller ones for the rest. TVM
generates scalar code for a vectorized loop whose predicate depends on the lane. Splitting off the
case that all lanes are valid keeps full vectors; the rest has a constant length and is split into
vectors of half, a quarter … of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.bounds import (
    at,
    conjunction,
    conjuncts,
    has_symbols,
    size_of,
    written,
)
from tvmify.compiler.kernels.common.rewriting import (
    rewrite_body,
    with_block_parts,
    with_loop_body,
    with_new_variables,
)
from tvmify.compiler.kernels.common.whole_first import whole_first
from tvmify.compiler.sizes import Size

#: Annotations of a block of partial sums: how long the row is, and by how many elements a step
#: along each axis of the block moves in it.
_BOUND, _STRIDES = "tvmify.row_length", "tvmify.row_strides"


def remember_bound(
    sch: s_tir.Schedule, partial: SBlockRV, length: Size, strides: Sequence[int]
) -> None:
    """Annotate a block of partial sums, just made by `rfactor`, with the length of the row.

    TVM's ``compute_at`` drops a block's predicate, here "this lane is still in the row", and the
    sums would run past the end. `split_tails` puts it back.

    Parameters
    ----------
    strides
        By how many elements of the row a step along each axis of the block moves.
    """
    sch.annotate(partial, _BOUND, written(length))
    sch.annotate(partial, _STRIDES, list(strides))


def split_tails(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with the tail of every vectorized loop split off."""
    is_symbolic = has_symbols(function)
    function = rewrite_body(function, lambda stmt: _with_bound(stmt, function))

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For):
            return None
        if is_symbolic and stmt.kind in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
            return whole_first(stmt, visit)
        if stmt.kind != tirx.ForKind.VECTORIZED:
            return None
        if not isinstance(stmt.body, s_tir.SBlockRealize):
            return None
        split = _split(stmt, stmt.body)
        if is_symbolic and isinstance(split, tirx.IfThenElse) and split.else_case is not None:
            # `ConvertSSA` does not find all that both define.
            return tirx.IfThenElse(
                split.condition, split.then_case, with_new_variables(split.else_case)
            )
        return split

    return rewrite_body(function, visit)


def _split(loop: tirx.For, realize: s_tir.SBlockRealize) -> Stmt:
    lane, lanes = loop.loop_var, int(loop.extent)
    of_lane, of_others = [], []
    # Predicates come from splits: once false for a lane they are false for all that follow.
    for condition in conjuncts(realize.predicate):
        first = at(condition, lane, 0)
        if str(first) == str(at(condition, lane, lanes - 1)):
            of_others.append(first)
        else:
            of_lane.append(condition)
    other = conjunction(of_others)
    if not of_lane:
        return with_loop_body(loop, s_tir.SBlockRealize(realize.iter_values, other, realize.block))
    full = conjunction([at(c, lane, lanes - 1) for c in of_lane])
    vector = with_loop_body(loop, s_tir.SBlockRealize(realize.iter_values, other, realize.block))
    rest = _rest(of_lane, lane, lanes)
    if rest == 0:  # whole vectors only
        return tirx.IfThenElse(full, vector, None)
    if rest is None:  # not a plain upper bound: the predicate stays, and lanes run one by one
        tail: Stmt = tirx.For(lane, loop.min, loop.extent, tirx.ForKind.SERIAL, realize)
        return tirx.IfThenElse(full, vector, tail)
    tail = _narrower(loop, realize, other, rest)
    begins = conjunction([at(c, lane, 0) for c in of_lane])
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
        values = [at(value, lane, inner + start) for value in realize.iter_values]
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


def _with_bound(stmt: Stmt, function: tirx.PrimFunc) -> Stmt | None:
    """Put back the predicate of a block that `remember_bound` marked."""
    if not isinstance(stmt, s_tir.SBlockRealize) or _BOUND not in stmt.block.annotations:
        return None
    block = stmt.block
    annotations = {k: v for k, v in block.annotations.items() if k not in (_BOUND, _STRIDES)}
    bare = with_block_parts(block, block.body, annotations)
    if all(int(variable.iter_type) != tirx.IterVar.CommReduce for variable in block.iter_vars):
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, bare)  # the first values
    strides: Any = block.annotations[_STRIDES]
    place = tirx.const(0, "int64")
    for value, stride in zip(stmt.iter_values, strides, strict=True):
        place = place + value * int(stride)
    within = place < size_of(block.annotations[_BOUND], function)
    predicate = conjunction([*conjuncts(stmt.predicate), within])
    return s_tir.SBlockRealize(stmt.iter_values, predicate, bare)


def _rest(conditions: list[Expr], lane: tirx.Var, lanes: int) -> int | None:
    """The number of lanes of the last, incomplete vector, if it is constant."""
    if len(conditions) != 1 or not isinstance(conditions[0], tirx.LT):
        return None
    index, bound = conditions[0].a, conditions[0].b
    if not isinstance(bound, tirx.IntImm):
        return None
    analyzer = sym.Analyzer()
    start = at(index, lane, 0)
    steps = analyzer.simplify(at(index, lane, 1) - start)
    if not (isinstance(steps, tirx.IntImm) and int(steps) == 1):
        return None
    aligned = analyzer.modular_set(start)
    if int(aligned.coeff) % lanes or int(aligned.base) % lanes:
        return None
    return int(bound) % lanes
