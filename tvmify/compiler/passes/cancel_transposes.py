"""Join transposes that follow each other; those that undo each other disappear.

So do reshapes to the same shape, which would stand between them.
``ConvertLayout`` leaves such pairs where a network permutes to channels last by itself.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


@tvm.transform.module_pass(opt_level=0, name="CancelTransposes")
class CancelTransposes:
    """``permute(permute(x, a), b)`` becomes one permutation, or `x` itself."""

    def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
        """Rewrite ``main``."""
        joiner = _Joiner(ir_mod)
        joiner.builder_.update_func(
            ir_mod.get_global_var("main"), joiner.visit_expr(ir_mod["main"])
        )
        return joiner.builder_.get()


@mutator
class _Joiner(PyExprMutator):
    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        if call.op == tvm.ir.Op.get("relax.reshape"):
            x = call.args[0]
            return x if list(x.ty.shape.values) == list(call.ty.shape.values) else call
        axes = _permutation(call)
        if axes is None:
            return call
        x = call.args[0]
        inner: relax.Expr | None = x
        while isinstance(inner, relax.Var):  # a reshape that went away leaves a second name
            inner = self.lookup_binding(inner)
        before = _permutation(inner)
        if before is not None:
            x, axes = inner.args[0], [before[axis] for axis in axes]
        return x if axes == sorted(axes) else relax.op.permute_dims(x, axes)


def _permutation(expr: relax.Expr | None) -> list[int] | None:
    """Return the axes of a call that permutes them, else None."""
    if not isinstance(expr, relax.Call) or expr.op != tvm.ir.Op.get("relax.permute_dims"):
        return None
    rank = len(expr.args[0].ty.shape.values)
    axes = expr.attrs.axes
    return [int(axis) % rank for axis in axes] if axes is not None else list(range(rank))[::-1]
