"""Let a 1×1 convolution take in the product with a gate per channel that comes before it."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmify.compiler.passes.rewriting import rewrite_main
from tvmify.compiler.schedule.pointwise import legalize_gated

_CONV2D, _MULTIPLY = tvm.ir.Op.get("relax.nn.conv2d"), tvm.ir.Op.get("relax.multiply")


@tvm.transform.module_pass(opt_level=0, name="GateConvolutions")
class GateConvolutions:
    """Lower such convolutions; runs before LegalizeOps, which lowers the others."""

    def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
        """Rewrite ``main``."""
        return rewrite_main(ir_mod, _Gating)


@mutator
class _Gating(PyExprMutator):
    def visit_call_(self, op: relax.Call) -> relax.Expr:
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
