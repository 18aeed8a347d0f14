"""Transpositions that leave elements where they are become reshapes, which are views."""

from __future__ import annotations

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.views import permutation, static_shape


@compiler_pass
class ReshapeTransposes(PyExprMutator):
    """Reshape where only axes of one element move, as between heads and positions of one token."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace one transposition."""
        call = super().visit_call_(op)
        axes = permutation(op)
        if axes is None:
            return call
        given = static_shape(op.args[0])
        longer = [axis for axis in axes if given[axis] != 1]
        if longer != sorted(longer):
            return call
        return relax.op.reshape(call.args[0], [given[axis] for axis in axes])
