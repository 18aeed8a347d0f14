"""What passes share that rewrite the calls of a program."""

from __future__ import annotations

import tvm
from tvm.relax.expr_functor import PyExprMutator


def rewrite_main(ir_mod: tvm.IRModule, mutator: type[PyExprMutator]) -> tvm.IRModule:
    """Let a mutator rewrite ``main``; functions that it adds become part of the module."""
    rewriting = mutator(ir_mod)
    rewriting.builder_.update_func(
        ir_mod.get_global_var("main"), rewriting.visit_expr(ir_mod["main"])
    )
    return rewriting.builder_.get()
