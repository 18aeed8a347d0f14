"""Gives both operands of an element-wise operator as many axes as the result. ``ConvertLayout`` can
only transpose operands that have all axes; if one has fewer, like a layer's scale of shape ``[C, 1,
1]``, it transposes the other one, a whole image, back instead.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: The operators, and the rank of images; only images have a layout.
_OPERATORS = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
_IMAGE = 4


@compiler_pass
class AlignRanks(PyExprMutator):
    """``x + y`` becomes ``x + reshape(y)`` where `x` is an image and `y` has fewer axes."""

    operators = tuple(tvm.ir.Op.get(f"relax.{name}") for name in _OPERATORS)

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Align the operands of an element-wise operator."""
        call = super().visit_call_(op)
        if not isinstance(call, relax.Call) or call.op not in self.operators:
            return call
        ranks = [len(argument.ty.shape.values) for argument in call.args]
        if max(ranks) != _IMAGE or min(ranks) in (0, _IMAGE):
            return call
        aligned = [self._aligned(argument) for argument in call.args]
        return relax.Call(call.op, aligned, call.attrs)

    def _aligned(self, operand: relax.Expr) -> relax.Expr:
        shape = sizes.sizes_of(operand.ty.shape)
        if len(shape) == _IMAGE:
            return operand
        return self.builder_.emit(relax.op.reshape(operand, [1] * (_IMAGE - len(shape)) + shape))
