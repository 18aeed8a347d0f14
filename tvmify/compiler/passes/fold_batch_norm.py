"""Multiply the scale that follows a convolution into its weights.

TVM's own pass wants constants. Here the weights are parameters; the product is computed once, by
the pack function, because it depends on weights alone.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.dpl import is_op, rewrite_call, wildcard


@tvm.transform.module_pass(opt_level=0, name="FoldBatchNorm")
class FoldBatchNorm:
    """``conv(x, w) * s`` becomes ``conv(x, w * s)``; ``(conv(x, w) + b) * s`` likewise.

    `s` has one element per channel, as the converter of batch normalization emits it, and
    depends on no input of ``main``.
    """

    def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
        """Rewrite ``main``."""
        main = ir_mod["main"]
        from_input = _depends_on_input(main)
        x, weight, bias, scale = (wildcard() for _ in range(4))
        convolution = is_op("relax.nn.conv2d")(x, weight)
        scaled = is_op("relax.multiply")(convolution, scale)
        scaled_with_bias = is_op("relax.multiply")(is_op("relax.add")(convolution, bias), scale)

        def varies(found: relax.Expr) -> bool:
            # What is found may be a variable or what is bound to it.
            return any(variable in from_input for variable in relax.analysis.free_vars(found))

        def fold(call: relax.Call, found: dict) -> relax.Expr:
            factor = found[scale]
            channels = int(found[weight].ty.shape[0])
            shape = [int(extent) for extent in factor.ty.shape]
            if varies(factor) or shape != [1, channels, 1, 1]:
                return call
            if bias in found and (varies(found[bias]) or int(found[bias].ty.shape[-3]) != channels):
                return call
            per_filter = relax.op.reshape(factor, [channels, 1, 1, 1])
            attrs = found[convolution].attrs
            result = relax.op.nn.conv2d(
                found[x],
                relax.op.multiply(found[weight], per_filter),
                strides=attrs.strides,
                padding=attrs.padding,
                dilation=attrs.dilation,
                groups=attrs.groups,
            )
            if bias in found:
                result = relax.op.add(result, relax.op.multiply(found[bias], factor))
            return result

        for pattern in (scaled_with_bias, scaled):
            main = rewrite_call(pattern, fold, main)
        ir_mod["main"] = main
        return ir_mod


def _depends_on_input(function: relax.Function) -> set[relax.Expr]:
    """Return the variables of a function that its first ``num_input`` parameters reach."""
    reached = set(function.params[: int(function.attrs["num_input"])])
    for block in function.body.blocks:
        for binding in block.bindings:
            if any(var in reached for var in relax.analysis.free_vars(binding.value)):
                reached.add(binding.var)
    return reached
