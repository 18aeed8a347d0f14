"""Fuses the multiplication by a gate per channel into the 1×1 convolution after it."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.kernels.conv.pointwise import legalize_gated
from tvmify.compiler.passes.compiler_pass import compiler_pass

_CONV2D, _MULTIPLY = tvm.ir.Op.get("relax.nn.conv2d"), tvm.ir.Op.get("relax.multiply")


@compiler_pass
class GateConvolutions(PyExprMutator):
    """Lower such convolutions; runs before LegalizeOps, which lowers the others."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Lower a convolution of a gated image."""
        call = super().visit_call_(op)
        if call.op != _CONV2D:
            return call
        product = self.lookup_binding(call.args[0])
        if not isinstance(product, relax.Call) or product.op != _MULTIPLY:
            return call
        for image, gate in (product.args, reversed(product.args)):
            gated = legalize_gated(self.builder_, call, image, gate)
            if gated is not None:
                return gated
        return call
