"""Ends loops with the last tile, instead of checking a condition in each iteration. With symbolic
rows, the last tile may have fewer rows, and the last block fewer tiles. A split adds a predicate to
every block inside. If it has the form ``something + loop variable < limit``, the loop ends there
instead, and whole tiles run without conditions. So do sums whose last terms are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.rewriting import (
    is_if_then_else,
    rewrite,
    rewrite_body,
    uses,
    with_values,
)
from tvmify.compiler.sizes import Size


def has_symbols(function: tirx.PrimFunc) -> bool:
    """Whether an argument of a function has a symbol in its shape."""
    shapes = (p.ty.shape for p in function.params if hasattr(p.ty, "shape"))
    return not all(sizes.is_static(*shape) for shape in shapes)


#: The operators of sizes.
_OPERATORS: dict[str, type[tirx.expr.BinaryOpExpr]] = {
    "+": tirx.Add,
    "-": tirx.Sub,
    "*": tirx.Mul,
    "//": tirx.FloorDiv,
    "%": tirx.FloorMod,
    "min": tirx.Min,
    "max": tirx.Max,
}


def written(size: Size) -> int | str:
    """Write a size as an annotation, which cannot hold symbols: by name, in postfix notation.

    Raises
    ------
    ValueError
        It contains an operator that sizes do not have.
    """
    if sizes.is_static(size):
        return int(size)
    if isinstance(size, tirx.Var):
        return str(size.name)
    operator = next((name for name, kind in _OPERATORS.items() if isinstance(size, kind)), None)
    if operator is None:
        raise ValueError(f"the size {size} is not a sum, product or quotient of symbols")
    return f"{written(size.a)} {written(size.b)} {operator}"


def size_of(annotation: object, function: tirx.PrimFunc) -> Size:
    """Return the size that `written` wrote."""
    if isinstance(annotation, (int, tirx.IntImm)):
        return int(annotation)
    shapes = (p.ty.shape for p in function.params if hasattr(p.ty, "shape"))
    symbols = {v.name: v for shape in shapes for size in shape for v in sizes.variables_of(size)}
    symbols |= {p.name: p for p in function.params if not hasattr(p.ty, "shape")}
    operands: list[Any] = []
    for name in str(annotation).split():
        if name in _OPERATORS:
            last = operands.pop()
            operands.append(_OPERATORS[name](operands.pop(), last))
        elif name in symbols:
            operands.append(symbols[name])
        else:
            operands.append(tirx.const(int(name), "int64"))
    (size,) = operands
    return size


def bound_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Turn predicates that all blocks in a serial loop share into the end of the loop."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or stmt.kind != tirx.ForKind.SERIAL:
            return None
        ends = _common_ends(stmt)
        if not ends:
            return None
        extent = stmt.extent
        for end in ends:
            extent = tirx.min(extent, end)
        body = rewrite(_without(stmt, ends), visit)
        return tirx.For(
            stmt.loop_var, stmt.min, extent, stmt.kind, body, annotations=stmt.annotations
        )

    return rewrite_body(function, visit) if has_symbols(function) else function


def _common_ends(loop: tirx.For) -> list[Expr]:
    """Return the ends of a loop given by conditions of every block in it."""
    found: list[list[Expr]] = []
    inside: list[tirx.Var] = []

    def visit(stmt: Stmt) -> Stmt | None:
        if isinstance(stmt, tirx.For):
            inside.append(stmt.loop_var)
        if isinstance(stmt, s_tir.SBlockRealize):
            conditions = conjuncts(stmt.predicate) + _conditions_of_term(stmt)
            ends = (_end(c, loop.loop_var) for c in conditions)
            found.append([end for end in ends if end is not None and not uses(end, inside)])
            return stmt
        return None

    rewrite(loop.body, visit)
    first, *others = found or [[]]
    return [end for end in first if all(_is_among(end, other) for other in others)]


def _conditions_of_term(realize: s_tir.SBlockRealize) -> list[Expr]:
    """Return the conditions, in loop variables, under which a block adds anything to a sum."""
    block, store = realize.block, realize.block.body
    if block.init is not None or not isinstance(store, tirx.BufferStore):
        return []
    total, place = store.value, tirx.BufferLoad(store.buffer, store.indices)
    if not isinstance(total, tirx.Add) or not tvm_ffi.structural_equal(total.a, place):
        return []
    if not is_if_then_else(total.b):
        return []
    condition, _, otherwise = total.b.args
    if not isinstance(otherwise, (tirx.FloatImm, tirx.IntImm)) or otherwise.value:
        return []
    pairs = zip(block.iter_vars, realize.iter_values, strict=True)
    values = {axis.var: value for axis, value in pairs}
    return conjuncts(with_values(condition, values))


def _without(loop: tirx.For, ends: list[Expr]) -> Stmt:
    """Return the body of a loop without the conditions that became its end."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, s_tir.SBlockRealize):
            return None
        left: list[Expr] = []
        for condition in conjuncts(stmt.predicate):
            end = _end(condition, loop.loop_var)
            if end is None or not _is_among(end, ends):
                left.append(condition)
        return s_tir.SBlockRealize(stmt.iter_values, conjunction(left), stmt.block)

    return rewrite(loop.body, visit)


def _is_among(end: Expr, others: list[Expr]) -> bool:
    return any(sym.Analyzer().can_prove_equal(end, other) for other in others)


def _end(condition: Expr, variable: tirx.Var) -> Expr | None:
    """Return where a condition ``rest + variable <(=) limit`` becomes false, or None."""
    if not isinstance(condition, (tirx.LE, tirx.LT)):
        return None
    if not uses(condition.a, [variable]) or uses(condition.b, [variable]):
        return None
    analyzer = sym.Analyzer()
    start = at(condition.a, variable, 0)
    if not analyzer.can_prove_equal(condition.a - start, variable):
        return None
    end = condition.b - start
    return analyzer.simplify(end + 1 if isinstance(condition, tirx.LE) else end)


def at(expression: Expr, variable: tirx.Var, value: object) -> Expr:
    """Return an expression where a variable has a value."""
    analyzer = sym.Analyzer()
    if isinstance(value, int):
        value = tirx.const(value, str(variable.ty.dtype))
    analyzer.bind(variable, value)
    return analyzer.simplify(expression)


def conjuncts(predicate: Expr) -> list[Expr]:
    """Return the conditions of which a predicate is the conjunction."""
    if isinstance(predicate, tirx.And):
        return conjuncts(predicate.a) + conjuncts(predicate.b)
    return [] if isinstance(predicate, tirx.IntImm) else [predicate]


def conjunction(conditions: Sequence[Expr]) -> Expr:
    """Return the predicate that all of some conditions hold."""
    return reduce(tirx.And, conditions) if conditions else tirx.const(1, "bool")
