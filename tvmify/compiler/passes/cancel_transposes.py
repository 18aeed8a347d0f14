"""Merges consecutive transposes and reshapes, and removes those that cancel. ``ConvertLayout``
leaves such pairs where a network itself permutes to channels last. Often element-wise operators are
in between, such as the scale and the residual of a ConvNeXt, so every transpose and reshape first
sinks below them. The operators then directly follow the product, and are fused with it. The same
helps convolutions in one and three dimensions, which are convolved as images: their reshape would
be between the convolution and its activation.
"""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.views import RESHAPES, common_axes, permutation

_UNARY = (
    "abs astype ceil clip cos erf exp floor log negative nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu "
    "nn.silu rsqrt sigmoid sin sqrt square tanh"
).split()
_BINARY = "add subtract multiply divide maximum minimum power".split()
_ROWWISE = frozenset(
    tvm.ir.Op.get(f"relax.nn.{name}")
    for name in ("layer_norm", "log_softmax", "rms_norm", "softmax")
)
_PERMUTE = tvm.ir.Op.get("relax.permute_dims")


@compiler_pass
class CancelTransposes(PyExprMutator):
    """``permute(permute(x, a), b)`` becomes one permutation, or `x` itself.

    ``f(permute(x))`` becomes ``permute(f(x))`` if `f` is element-wise; with two operands, if both
    are permuted alike or one is broadcast. ``f(reshape(x))`` likewise, if it neither merges nor
    splits an axis along which the other operand varies.
    """

    unary = frozenset(tvm.ir.Op.get(f"relax.{name}") for name in _UNARY)
    binary = frozenset(tvm.ir.Op.get(f"relax.{name}") for name in _BINARY)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Leave no second name where a move is dropped: ConvertLayout knows no layout for it."""
        value = self.visit_expr(binding.value)
        if not isinstance(binding.var, relax.DataflowVar):
            value = self.builder_.emit_output(value)
        elif not isinstance(value, relax.Var):
            value = self.builder_.emit(value)
        self.set_var_remap(binding.var, value)

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Merge, drop or sink a transpose or reshape."""
        call = super().visit_call_(op)
        return self._rewritten(call) if isinstance(call, relax.Call) else call

    def _rewritten(self, call: relax.Call) -> relax.Expr:
        if _is_move(call):
            return self._joined(call)
        if call.op in self.unary:
            move = self._move(call.args[0])
            if move is None:
                return call
            return self._sunk(call, [move.args[0], *call.args[1:]], move)
        if call.op in self.binary:
            return self._below_both(call)
        if call.op in _ROWWISE:
            return self._below_row(call)
        return call

    def _below_row(self, call: relax.Call) -> relax.Expr:
        """Sink a reshape of symbolic rows below operators that work row by row."""
        move, *others = self._move(call.args[0]), *call.args[1:]
        if move is None or not _numbers_rows(move) or not _is_along_rows(call):
            return call
        return self._sunk(call, [move.args[0], *others], move)

    def _joined(self, call: relax.Call) -> relax.Expr:
        x = call.args[0]
        before = self._move(x)
        axes = permutation(call)
        if axes is None:
            shape = _shape(call)
            if before is None or before.op not in RESHAPES:
                return x if sizes.same_shape(_shape(x), shape) else call
            x = before.args[0]
            return x if sizes.same_shape(_shape(x), shape) else relax.op.reshape(x, shape)
        inner = permutation(before)
        if inner is not None:
            x, axes = before.args[0], [inner[axis] for axis in axes]
        return x if axes == sorted(axes) else relax.op.permute_dims(x, axes)

    def _below_both(self, call: relax.Call) -> relax.Expr:
        moves = [self._move(argument) for argument in call.args]
        for move in (move for move in moves if move is not None):
            arguments = []
            for argument, own in zip(call.args, moves, strict=True):
                alike = own is not None and _signature(own) == _signature(move)
                arguments.append(own.args[0] if alike else self._before(move, argument, call))
            if all(argument is not None for argument in arguments):
                return self._sunk(call, arguments, move)
        return call

    def _before(self, move: relax.Call, operand: relax.Expr, call: relax.Call) -> relax.Expr | None:
        """Return the operand for the same call before a move, if it is small."""
        shape = _shape(operand)
        if not shape:
            return operand
        axes = permutation(move)
        if axes is not None:
            if len(shape) != len(axes) or not _is_broadcast(operand, call.args):
                return None
            inverse = [axes.index(axis) for axis in range(len(axes))]
            return self.builder_.emit(relax.op.permute_dims(operand, inverse))
        result = _shape(call)
        if not sizes.same_shape(_shape(move), result):
            return None  # the operand makes an axis of one element longer
        if _numbers_rows(move) and len(shape) == 1:
            return operand
        if _numbers_rows(move) and sizes.same_shape(shape, result):
            return self.builder_.emit(relax.op.reshape(operand, _shape(move.args[0])))
        if not prod(sizes.hints(shape)) < prod(sizes.hints(result)):
            return None
        shape = [1] * (len(result) - len(shape)) + shape
        source = _shape(move.args[0])
        before = [1] * len(source)
        for mine, theirs in common_axes(result, source):
            if len(mine) == len(theirs) == 1:
                before[theirs[0]] = shape[mine[0]]
            elif not all(sizes.is_one(shape[axis]) for axis in mine):
                return None
        return self.builder_.emit(relax.op.reshape(operand, before))

    def _sunk(self, call: relax.Call, arguments: list[relax.Expr], move: relax.Call) -> relax.Expr:
        above = self.builder_.normalize(relax.Call(call.op, arguments, call.attrs))
        # It may now follow another move: volumes have two permutations and a reshape.
        above = self.builder_.emit(self._rewritten(above))
        return relax.Call(move.op, [above, *move.args[1:]], move.attrs)

    def _move(self, x: relax.Expr | None) -> relax.Call | None:
        """Return the call that permutes or reshapes, if a variable is bound to one."""
        if isinstance(x, relax.Var):
            x = self.lookup_binding(x)
        return x if _is_move(x) else None


def _is_move(x: relax.Expr | None) -> bool:
    return isinstance(x, relax.Call) and x.op in (_PERMUTE, *RESHAPES)


def _numbers_rows(move: relax.Call) -> bool:
    """Whether a move is a reshape that splits rows that `FlattenRows` has merged."""
    rows, shape = _shape(move.args[0]), _shape(move)
    return (
        move.op in RESHAPES
        and len(rows) == 2
        and not sizes.is_static(rows[0])
        and sizes.same(rows[1], shape[-1])
    )


def _is_along_rows(call: relax.Call) -> bool:
    """Whether a normalization runs along the last axis, given as -1."""
    axes = call.attrs.axes if hasattr(call.attrs, "axes") else [call.attrs.axis]
    return [int(axis) for axis in axes] == [-1]


def _signature(move: relax.Call) -> tuple[list[int | str], list[int | str], list[int] | None]:
    """What is equal for two moves that move tensors of one shape in the same way."""
    before, after = ([*map(sizes.comparable, _shape(x))] for x in (move.args[0], move))
    return before, after, permutation(move)


def _shape(x: relax.Expr) -> list[Any]:
    return sizes.sizes_of(x.ty.shape)


def _is_broadcast(operand: relax.Expr, operands: list[relax.Expr]) -> bool:
    """Whether an operand is so much smaller that permuting it costs next to nothing."""
    wide, ranks = [], []
    for x in (operand, *operands):
        shape = _shape(x)
        ranks.append(len(shape))
        wide.append(sum(not sizes.is_one(size) for size in shape))
    return ranks[0] in (0, max(ranks)) and wide[0] <= 1 < max(wide)
