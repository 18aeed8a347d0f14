"""Prefixes the names of kernels, so that none is the name of a C library function. LLVM takes a
call of ``round`` or ``pow`` for the library's, which has no side effect, and drops it. The prefix
also identifies our symbols in profiles.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmify.compiler.passes.compiler_pass import compiler_pass

PREFIX = "tvmify_"


@compiler_pass
class NameKernels:
    """Rename every TIR function, and the calls of it."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite the module."""
        renamer = _Renamer()
        functions = ir_mod.functions_items()
        for variable, function in functions:
            if isinstance(function, tirx.PrimFunc):
                renamed = renamer.builder_.add_func(function, PREFIX + variable.name_hint)
                renamer.names[variable] = renamed
        for variable, function in functions:
            if isinstance(function, relax.Function):
                renamer.builder_.add_func(renamer.visit_expr(function), variable.name_hint)
        return renamer.builder_.get()


@mutator
class _Renamer(PyExprMutator):
    def __init__(self) -> None:
        super().__init__()
        self.names: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}

    def visit_global_var_(self, op: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self.names.get(op, op)
