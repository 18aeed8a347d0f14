"""Drop the virtual machine's own check of every argument in every call.

The executor has compared dtype and shape of each with the key that the program was compiled for,
and all shapes are static; the checks would cost more than a small kernel does.
"""

from __future__ import annotations

import tvm
from tvm import relax

from tvmify.compiler.passes.compiler_pass import compiler_pass

CHECKS = ("vm.builtin.check_tensor_info", "vm.builtin.match_shape")


@compiler_pass
class TrustArguments:
    """Remove calls of `CHECKS`; runs last, on the virtual machine's own operators."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite every Relax function."""
        for variable, function in ir_mod.functions_items():
            if isinstance(function, relax.Function):
                blocks = [
                    relax.BindingBlock([b for b in block.bindings if not _is_check(b)])
                    for block in function.body.blocks
                ]
                body = relax.SeqExpr(blocks, function.body.body)
                ir_mod[variable] = relax.Function(
                    function.params, body, function.ret_ty, function.is_pure, function.attrs
                )
        return ir_mod


def _is_check(binding: relax.Binding) -> bool:
    operator = getattr(binding.value, "op", None)
    return isinstance(operator, relax.ExternFunc) and str(operator.global_symbol) in CHECKS
