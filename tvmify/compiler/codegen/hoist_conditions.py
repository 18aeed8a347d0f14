"""Hoist conditions out of loops, as TVM does, but not out of one of two branches. TVM moves such a
condition in front of both branches. Where a chunk of tiles ended with the image, and a vector with
the channels, the condition for whole vectors then guarded the others as well: the last channels of
Winograd kernels were never stored.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx

from tvmify.compiler.kernels.common.rewriting import rewrite
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class HoistConditions:
    """Run ``HoistIfThenElse`` on a module of one function, unless a branch of it has conditions."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite the function."""
        ((_, function),) = ir_mod.functions_items()
        return (
            ir_mod
            if _decides_in_branch(function.body)
            else s_tir.transform.HoistIfThenElse()(ir_mod)
        )


def _decides_in_branch(body: tirx.Stmt, branch: bool = False) -> bool:
    """Whether one of two branches contains a condition; `branch`: `body` is itself a branch."""
    found = False

    def visit(stmt: tirx.Stmt) -> tirx.Stmt | None:
        nonlocal found
        if isinstance(stmt, tirx.IfThenElse):
            cases = [stmt.then_case, *([stmt.else_case] if stmt.else_case is not None else [])]
            found |= branch or any(_decides_in_branch(case, len(cases) > 1) for case in cases)
            return stmt
        return None

    rewrite(body, visit)
    return found
