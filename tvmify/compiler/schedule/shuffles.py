"""Which functions read vectors of elements that lie close together, but not in order."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.schedule.chain import substitute
from tvmify.compiler.schedule.rewriting import rewrite_body

#: Attribute of such a function, for `tvmify.compiler.passes.shuffle_loads`.
SHUFFLES = "tvmify.shuffles"


def mark_shuffles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Mark a scheduled function if lanes of a vector are divided, multiplied or turned round.

    Looking through every load of every function where they are flat, and loops unrolled, would
    take as long as the schedules do.
    """
    found = False

    def visit(stmt: Stmt) -> Stmt | None:
        nonlocal found
        if not isinstance(stmt, tirx.For) or stmt.kind != tirx.ForKind.VECTORIZED:
            return None
        if isinstance(stmt.body, s_tir.SBlockRealize):
            found = found or _reads_out_of_order(stmt.loop_var, stmt.body)
        return stmt

    rewrite_body(function, visit)
    return function.with_attr(SHUFFLES, True) if found else function


def _reads_out_of_order(lane: tirx.Var, realize: s_tir.SBlockRealize) -> bool:
    variables = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    names = [variable.var.name for variable, value in variables if lane.name in str(value)]
    found = False

    def visit(node: Expr) -> Expr | None:
        nonlocal found
        if isinstance(node, TensorLoad) and node.indices:
            index = node.indices[-1]
            if not isinstance(index, (tirx.Var, tirx.IntImm)):
                text = str(index)
                found = found or (
                    any(sign in text for sign in "*/%-") and any(name in text for name in names)
                )
        return None

    if isinstance(realize.block.body, tirx.BufferStore):
        substitute(realize.block.body.value, visit)
    return found
