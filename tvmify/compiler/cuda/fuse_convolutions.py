"""A convolution with its bias, a residual and ReLU as one call of cuDNN, where that is faster.

Otherwise the convolution is one call, and a kernel of TVM's does the rest, which reads and writes
the result once more. cuDNN rounds the bias to the type of the images.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.aten.calls import Aten, aten
from tvmify.compiler.kernels.common.choice import choose
from tvmify.compiler.kernels.common.legalizing import is_weight
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call, values_and_readers

#: The candidates: the first is taken where nothing was measured.
_APART, _FUSED = "apart", "fused"
_DTYPES = frozenset({"float16", "bfloat16", "float32"})
_ADD, _ASTYPE = (tvm.ir.Op.get(f"relax.{name}") for name in ("add", "astype"))
_CONVOLUTION, _RELU = (tvm.ir.Op.get(f"relax.nn.{name}") for name in ("conv2d", "relu"))


@dataclass(frozen=True)
class _Chain:
    """``relu(convolution + bias + residual)``."""

    convolution: relax.Call
    bias: Expr
    residual: Expr | None

    @property
    def operands(self) -> list[Expr]:
        residual = [] if self.residual is None else [self.residual]
        return [*self.convolution.args, self.bias, *residual]


@compiler_pass
class FuseConvolutions(PyExprMutator):
    """Call cuDNN for whole chains, where that was measured to be faster."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.values, self.readers = values_and_readers(ir_mod["main"])

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace the ReLU at the end of a chain; the rest of it is dead code then."""
        chain = self.chain(op) if is_call(_RELU, op) else None
        if chain is None or not is_weight(self.builder_, self.visit_expr(chain.bias)):
            return super().visit_call_(op)
        operands = [self.visit_expr(x) for x in chain.operands]
        if choose(_workload(chain), (_APART, _FUSED), lambda: _sample(chain)) == _APART:
            return super().visit_call_(op)
        channels = _shape(op)[-1]
        flat = self.builder_.emit(relax.op.reshape(operands[2], [channels]))
        dtype = operands[0].ty.dtype
        if flat.ty.dtype != dtype:
            flat = self.builder_.emit(relax.op.astype(flat, dtype))
        operands[2] = flat
        body = functools.partial(_body, chain.convolution.attrs)
        result = self.builder_.emit(aten(operands, _shape(op), str(dtype), body))
        return result if op.ty.dtype == dtype else relax.op.astype(result, op.ty.dtype)

    def chain(self, relu: relax.Call) -> _Chain | None:
        """Return the chain that a ReLU ends, if it ends one that cuDNN has."""
        value, residual = self.uncast(self.only_read_here(relu.args[0])), None
        found = self.biased(value)
        if found is None and is_call(_ADD, value):
            for x, other in (value.args, reversed(value.args)):
                found = self.biased(self.only_read_here(x))
                if found is not None and _shape(other) == _shape(relu):
                    source = self.values.get(other)
                    residual = source.args[0] if is_call(_ASTYPE, source) else other
                    break
            else:
                return None
        if found is None:
            return None
        convolution, bias = found
        alike = (*convolution.args, convolution, *([] if residual is None else [residual]))
        dtypes = {str(x.ty.dtype) for x in alike}
        is_cudnns = len(dtypes) == 1 and dtypes <= _DTYPES and _is_plain(convolution)
        return _Chain(convolution, bias, residual) if is_cudnns else None

    def biased(self, value: Expr | None) -> tuple[relax.Call, Expr] | None:
        """Return a convolution and what is added to each channel, in float32 or as it is."""
        value = self.uncast(value)
        if not is_call(_ADD, value):
            return None
        for x, bias in (value.args, reversed(value.args)):
            convolution = self.uncast(self.only_read_here(x))
            if is_call(_CONVOLUTION, convolution) and _is_bias(bias, _shape(convolution)):
                return convolution, bias
        return None

    def uncast(self, value: Expr | None) -> Expr | None:
        """Return what was cast, if that is all that happened to it."""
        while is_call(_ASTYPE, value):
            value = self.only_read_here(value.args[0])
        return value

    def only_read_here(self, x: Expr) -> Expr | None:
        """Return the value of a variable that has a single reader."""
        return self.values.get(x) if self.readers[x] == 1 else None


def _is_bias(x: Expr, shape: Sequence[int]) -> bool:
    return _shape(x) in ([1, 1, 1, shape[-1]], [shape[-1]])


def _is_plain(convolution: relax.Call) -> bool:
    attributes = convolution.attrs
    top, left, bottom, right = (int(size) for size in attributes.padding)
    layouts = str(attributes.data_layout), str(attributes.kernel_layout)
    return (top, left) == (bottom, right) and layouts == ("NHWC", "OHWI")


def _body(attributes: Any, record: Aten, x: Any, weight: Any, bias: Any, *residual: Any) -> Any:
    images = [record("permute", image, [0, 3, 1, 2]) for image in (x, weight, *residual)]
    geometry = [
        [int(size) for size in sizes]
        for sizes in (attributes.strides, attributes.padding[:2], attributes.dilation)
    ]
    groups = int(attributes.groups)
    if residual:
        *convolved, added = images
        name = "cudnn_convolution_add_relu"
        result = record(name, *convolved, added, 1.0, bias, *geometry, groups)
    else:
        result = record("cudnn_convolution_relu", *images, bias, *geometry, groups)
    return record("permute", result, [0, 2, 3, 1])


def _workload(chain: _Chain) -> str:
    convolution = chain.convolution
    attributes = convolution.attrs
    sizes = " by ".join("x".join(map(str, _shape(x))) for x in convolution.args)
    how = ["strides", "padding", "dilation"]
    numbers = " ".join(f"{name} {[int(n) for n in getattr(attributes, name)]}" for name in how)
    end = " + residual" if chain.residual is not None else ""
    return f"convolution {convolution.ty.dtype} {sizes} {numbers} of {attributes.groups}{end}"


def _sample(chain: _Chain) -> Sample:
    result = relax.TensorType(_shape(chain.convolution), chain.convolution.ty.dtype)
    weights = (False, True, True, *([False] if chain.residual is not None else []))
    types = [*(operand.ty for operand in chain.operands), result]
    return Sample(types, weights, functools.partial(_spelt, chain.convolution.attrs))


def _spelt(
    attributes: Any, builder: relax.BlockBuilder, operands: Sequence[relax.Var]
) -> relax.Expr:
    x, weight, bias, *residual = operands
    value = builder.emit(relax.Call(_CONVOLUTION, [x, weight], attributes))
    if bias.ty.dtype != value.ty.dtype:
        value = builder.emit(relax.op.astype(value, bias.ty.dtype))
    value = builder.emit(relax.op.add(value, bias))
    if value.ty.dtype != x.ty.dtype:
        value = builder.emit(relax.op.astype(value, x.ty.dtype))
    for other in residual:
        value = builder.emit(relax.op.add(value, other))
    return relax.op.nn.relu(value)


def _shape(x: Expr) -> list[int]:
    return [int(extent) for extent in x.ty.shape.values]
