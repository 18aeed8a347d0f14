"""Folds the scale after a product with weights into the weights. TVM's own pass needs constants.
Here weights are parameters, and the scaled weights, which depend on weights only, are computed once
by the pack function. This covers convolutions, transposed convolutions and matrix products.
"""

from __future__ import annotations

from math import prod

import tvm
from tvm import relax
from tvm.ir import PrimType
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.backend import is_for_gpu
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call, values_and_readers

_ADD, _MULTIPLY = tvm.ir.Op.get("relax.add"), tvm.ir.Op.get("relax.multiply")
_ASTYPE = tvm.ir.Op.get("relax.astype")
#: The axis of the channels in a product, counted from the end, and how many axes follow it in the
#: weights.
_CHANNELS = {
    tvm.ir.Op.get("relax.nn.conv2d"): (-3, 3),
    tvm.ir.Op.get("relax.nn.conv2d_transpose"): (-3, 2),
    tvm.ir.Op.get("relax.matmul"): (-1, 0),
}


@compiler_pass
class FoldBatchNorm(PyExprMutator):
    """``conv(x, w) * s`` becomes ``conv(x, w * s)``, and ``(conv(x, w) + b) * s`` likewise.

    `s` has one element per channel, as the converter of batch normalization emits it, and like `w`
    and `b` it does not depend on inputs of ``main``. Products with other users are not changed.
    ``(conv(x, w) + b) + c`` becomes ``conv(x, w) + (b + c)``.
    """

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        main = ir_mod["main"]
        self.values, self.readers = values_and_readers(main)
        self.readers.update(relax.analysis.free_vars(main.body.body))
        inputs = int(main.attrs["num_input"])
        self.known = {variable: i >= inputs for i, variable in enumerate(main.params)}
        for variable in self.values:  # in order, so that no chain has to be followed to its start
            self._is_weight(variable)

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Fold the factor of a product, and merge the shifts after it."""
        call = super().visit_call_(op)
        rewrite = self._scaled if is_call(_MULTIPLY, call) else self._shifted
        for x, other in _both_ways(call) if call.op in (_MULTIPLY, _ADD) else ():
            if len(other.ty.shape) <= len(x.ty.shape) and self._is_weight(other):
                rewritten = rewrite(x, other)
                if rewritten is not None:
                    return rewritten
        return call

    def _scaled(self, x: relax.Expr, factor: relax.Expr) -> relax.Expr | None:
        """Return ``x * factor`` with the factor in the weights, if they can take it."""
        call = self._call(x)
        if is_call(_ASTYPE, call) and _is_rounded(call.args[0], factor):
            product = self._scaled(call.args[0], factor)
            return None if product is None else relax.op.astype(product, factor.ty.dtype)
        if is_call(_ADD, call):
            for y, shift in _both_ways(call):
                own = self.builder_.normalize(_times(shift, factor))
                if self._is_weight(shift) and _size(own) == _size(shift):
                    product = self._scaled(y, factor)
                    if product is not None:
                        return relax.op.add(product, own)
        if call is None or call.op not in _CHANNELS:
            return None
        axis, after = _CHANNELS[call.op]
        weight = call.args[1]
        shape = [_size(factor)] + [1] * after
        if (
            not self._is_weight(weight)
            or (weight.ty.dtype != factor.ty.dtype and not _is_rounded(weight, factor))
            or _axis(factor, axis) != _size(factor)
            or _axis(weight, -len(shape)) != _size(factor)
            or len(weight.ty.shape) == 1
        ):
            return None
        weight = _times(weight, self.builder_.normalize(relax.op.reshape(factor, shape)))
        return relax.Call(call.op, [call.args[0], weight], call.attrs)

    def _shifted(self, x: relax.Expr, shift: relax.Expr) -> relax.Expr | None:
        """Return ``x + shift`` with the shift in the bias, if there is one of the same shape."""
        call = self._call(x)
        for y, bias in _both_ways(call) if is_call(_ADD, call) else ():
            product = self._call(y)
            if product is not None and product.op in _CHANNELS and self._is_weight(bias):
                both = self.builder_.normalize(relax.op.add(bias, shift))
                if _size(both) == _size(bias) == _size(shift):
                    return relax.op.add(y, both)
        return None

    def _call(self, x: relax.Expr) -> relax.Call | None:
        """Return the call that computes a value, if the value has no other users."""
        if not isinstance(x, relax.Var) or self.readers[x] > 1:
            return None
        value = self.lookup_binding(x)
        return value if isinstance(value, relax.Call) else None

    def _is_weight(self, x: relax.Expr) -> bool:
        """Whether a value depends only on weights and constants."""
        if not isinstance(x, relax.Var):
            return all(self._is_weight(variable) for variable in relax.analysis.free_vars(x))
        if isinstance(x.ty, PrimType):
            return False  # a size of the call
        if isinstance(x.ty, relax.TensorType) and not sizes.is_static(*x.ty.shape.values):
            return False  # a part of a weight that is as long as an argument
        if x not in self.known:
            value = self.values[x] if x in self.values else self.lookup_binding(x)
            self.known[x] = self._is_weight(value)
        return self.known[x]


def _is_rounded(x: relax.Expr, factor: relax.Expr) -> bool:
    """Whether a tensor has a half type, its factor is of float32, and a library multiplies.

    On a CPU the factor stays outside: the kernel of the product takes it in before it rounds.
    """
    dtypes = str(x.ty.dtype), str(factor.ty.dtype)
    return is_for_gpu() and dtypes in (("float16", "float32"), ("bfloat16", "float32"))


def _times(weight: relax.Expr, factor: relax.Expr) -> relax.Expr:
    """Return the product in the type of the weight, rounded once."""
    dtype, wide = weight.ty.dtype, factor.ty.dtype
    if dtype == wide:
        return relax.op.multiply(weight, factor)
    return relax.op.astype(relax.op.multiply(relax.op.astype(weight, wide), factor), dtype)


def _both_ways(call: relax.Call) -> tuple[tuple[relax.Expr, relax.Expr], ...]:
    x, y = call.args
    return (x, y), (y, x)


def _size(x: relax.Expr) -> int:
    return prod(int(extent) for extent in x.ty.shape)


def _axis(x: relax.Expr, axis: int) -> int:
    """The extent of an axis, counted from the back."""
    return int(x.ty.shape[axis]) if len(x.ty.shape) >= -axis else 1
