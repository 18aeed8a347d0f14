"""Join transposes that follow each other; those that undo each other disappear.

So do reshapes to the same shape, which would stand between them.

``ConvertLayout`` leaves such pairs where a network permutes to channels last by itself. Often
element-wise operators stand between the two, as the scale and the residual of a ConvNeXt; so every
transpose first sinks below them.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmify.compiler.passes.rewriting import rewrite_main

_UNARY = (
    "abs astype ceil clip cos erf exp floor log negative nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu "
    "nn.silu rsqrt sigmoid sin sqrt square tanh"
).split()
_BINARY = "add subtract multiply divide maximum minimum power".split()


@tvm.transform.module_pass(opt_level=0, name="CancelTransposes")
class CancelTransposes:
    """``permute(permute(x, a), b)`` becomes one permutation, or `x` itself.

    ``f(permute(x))`` becomes ``permute(f(x))`` if `f` is element-wise; with two operands, if both
    are permuted alike or one is broadcast.
    """

    def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
        """Rewrite ``main``."""
        return rewrite_main(ir_mod, _Joiner)


@mutator
class _Joiner(PyExprMutator):
    unary = frozenset(tvm.ir.Op.get(f"relax.{name}") for name in _UNARY)
    binary = frozenset(tvm.ir.Op.get(f"relax.{name}") for name in _BINARY)

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        if not isinstance(call, relax.Call):
            return call
        if call.op == tvm.ir.Op.get("relax.reshape"):
            x = call.args[0]
            return x if list(x.ty.shape.values) == list(call.ty.shape.values) else call
        axes = _permutation(call)
        if axes is not None:
            return self._joined(call.args[0], axes)
        if call.op in self.unary:
            source, axes = self._source(call.args[0])
            return call if axes is None else self._sunk(call, [source, *call.args[1:]], axes)
        if call.op in self.binary:
            return self._below_both(call)
        return call

    def _joined(self, x: relax.Expr, axes: list[int]) -> relax.Expr:
        x, before = self._source(x)
        if before is not None:
            axes = [before[axis] for axis in axes]
        return x if axes == sorted(axes) else relax.op.permute_dims(x, axes)

    def _below_both(self, call: relax.Call) -> relax.Expr:
        found = [self._source(argument) for argument in call.args]
        axes = next((axes for _, axes in found if axes is not None), None)
        if axes is None:
            return call
        arguments = []
        for argument, (source, own) in zip(call.args, found, strict=True):
            if own == axes:
                arguments.append(source)
            elif own is None and _is_broadcast(argument, call.args):
                arguments.append(self._turned_back(argument, axes))
            else:
                return call
        return self._sunk(call, arguments, axes)

    def _turned_back(self, operand: relax.Expr, axes: list[int]) -> relax.Expr:
        shape = [int(size) for size in operand.ty.shape]
        if not shape:
            return operand
        inverse = [axes.index(axis) for axis in range(len(axes))]
        return self.builder_.emit(relax.op.permute_dims(operand, inverse))

    def _sunk(self, call: relax.Call, arguments: list[relax.Expr], axes: list[int]) -> relax.Expr:
        call = relax.Call(call.op, arguments, call.attrs)
        return relax.op.permute_dims(self.builder_.emit(call), axes)

    def _source(self, x: relax.Expr) -> tuple[relax.Expr, list[int] | None]:
        """What a variable is a permutation of, and its axes; else itself, and None."""
        value: relax.Expr | None = x
        while isinstance(value, relax.Var):  # a reshape that went away leaves a second name
            value = self.lookup_binding(value)
        axes = _permutation(value)
        return (x, None) if axes is None else (value.args[0], axes)


def _is_broadcast(operand: relax.Expr, operands: list[relax.Expr]) -> bool:
    """Whether an operand is so much smaller that to permute it costs next to nothing."""
    sizes, ranks = [], []
    for x in (operand, *operands):
        shape = [int(size) for size in x.ty.shape]
        ranks.append(len(shape))
        sizes.append(sum(size > 1 for size in shape))
    return ranks[0] in (0, max(ranks)) and sizes[0] <= 1 < max(sizes)


def _permutation(expr: relax.Expr | None) -> list[int] | None:
    """Return the axes of a call that permutes them, else None."""
    if not isinstance(expr, relax.Call) or expr.op != tvm.ir.Op.get("relax.permute_dims"):
        return None
    rank = len(expr.args[0].ty.shape.values)
    axes = expr.attrs.axes
    return [int(axis) % rank for axis in axes] if axes is not None else list(range(rank))[::-1]
