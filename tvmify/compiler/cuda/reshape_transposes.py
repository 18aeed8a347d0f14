"""Transpositions that leave elements where they are become reshapes, which are views."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call

_PERMUTE = tvm.ir.Op.get("relax.permute_dims")


@compiler_pass
class ReshapeTransposes(PyExprMutator):
    """Reshape where only axes of one element move, as between heads and positions of one token."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace one transposition."""
        call = super().visit_call_(op)
        if not is_call(_PERMUTE, op):
            return call
        given = [int(extent) for extent in op.args[0].ty.shape.values]
        rank = len(given)
        axes = [*range(rank)][::-1] if op.attrs.axes is None else [int(n) for n in op.attrs.axes]
        longer = [axis % rank for axis in axes if given[axis % rank] != 1]
        if longer != sorted(longer):
            return call
        return relax.op.reshape(call.args[0], [given[axis % rank] for axis in axes])
