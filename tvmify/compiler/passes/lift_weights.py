"""Names the function that `LiftTransformParams` makes, and flattens its arguments."""

from __future__ import annotations

import tvm
from tvm import relax

from tvmify.compiler.passes.compiler_pass import compiler_pass

#: LiftTransformParams' name of the function that it lifts from ``main``.
LIFTED = "main_transform_params"


@compiler_pass
class LiftWeights:
    """Rename the lifted function to ``pack`` and let it take each weight as an argument.

    It is removed if there is nothing to pack because the program reads no weight.
    """

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite the lifted function."""
        lifted = ir_mod[LIFTED]
        del ir_mod[LIFTED]
        if lifted.ret_ty.fields:
            ir_mod["pack"] = _flat(lifted).with_attr("global_symbol", "pack")
        return ir_mod


def _flat(function: relax.Function) -> relax.Function:
    (whole,) = function.params
    weights = [relax.Var(f"weight{i}", ty) for i, ty in enumerate(whole.ty.fields)]
    tuple_of_weights = relax.BindingBlock([relax.VarBinding(whole, relax.Tuple(weights))])
    body = relax.SeqExpr([tuple_of_weights, *function.body.blocks], function.body.body)
    return relax.Function(weights, body, function.ret_ty, is_pure=True)
