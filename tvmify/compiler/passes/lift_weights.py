"""Moves what depends on weights alone from ``main`` to a function of the weights."""

from __future__ import annotations

import tvm
from tvm import relax

from tvmify.compiler.passes.compiler_pass import compiler_pass

#: LiftTransformParams' name of the function that it lifts from ``main``.
LIFTED = "main_transform_params"


@compiler_pass
class LiftWeights:
    """Make the function ``pack``, which takes each weight as an argument.

    There is none if there is nothing to pack because the program reads no weight.
    """

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Lift a function from ``main``."""
        lift = relax.transform.LiftTransformParams()
        whole, ir_mod = ir_mod, lift(ir_mod)
        if not _has_results(ir_mod["main"]):
            # No result depends on an input. Bindings outside of dataflow blocks stay.
            ir_mod = lift(relax.transform.ToNonDataflow()(whole))
            ir_mod = relax.transform.ConvertToDataflow(1)(ir_mod)
        lifted = ir_mod[LIFTED]
        del ir_mod[LIFTED]
        if lifted.ret_ty.fields:
            ir_mod["pack"] = _flat(lifted).with_attr("global_symbol", "pack")
        return ir_mod


def _has_results(main: relax.Function) -> bool:
    """Whether the results of ``main`` were not lifted, which leaves a variable without a value."""
    bound = {binding.var for block in main.body.blocks for binding in block.bindings}
    return main.body.body in bound


def _flat(function: relax.Function) -> relax.Function:
    (whole,) = function.params
    weights = [relax.Var(f"weight{i}", ty) for i, ty in enumerate(whole.ty.fields)]
    tuple_of_weights = relax.BindingBlock([relax.VarBinding(whole, relax.Tuple(weights))])
    body = relax.SeqExpr([tuple_of_weights, *function.body.blocks], function.body.body)
    return relax.Function(weights, body, function.ret_ty, is_pure=True)
