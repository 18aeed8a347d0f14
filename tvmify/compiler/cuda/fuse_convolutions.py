"""Convolutions with their epilogue: a bias, a residual and ReLU.

Unfused, the convolution is one call of cuDNN, and a kernel of TVM does the rest, which reads and
writes the result once more. Fused, cuDNN computes all of it. A convolution of patches may be a
product, by cuBLAS with bias and ReLU. Libraries round the bias to the dtype of the images.
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
from tvmify.compiler.cuda import patches
from tvmify.compiler.cuda.gpus import FLOAT_DTYPES
from tvmify.compiler.kernels.common.choice import choose
from tvmify.compiler.kernels.common.legalizing import is_weight
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call, value_read_once, values_and_readers
from tvmify.compiler.passes.views import static_shape

#: The candidates.
_SEPARATE, _FUSED, _PRODUCT = "separate", "fused", "product"
_ADD, _ASTYPE = (tvm.ir.Op.get(f"relax.{name}") for name in ("add", "astype"))
_CONVOLUTION, _RELU = (tvm.ir.Op.get(f"relax.nn.{name}") for name in ("conv2d", "relu"))


@dataclass(frozen=True)
class _Chain:
    """``relu(convolution + bias + residual)``; only the convolution is always present.

    There is a residual only if there are a bias and ReLU.
    """

    convolution: relax.Call
    bias: Expr | None = None
    residual: Expr | None = None
    has_relu: bool = False

    @property
    def operands(self) -> list[Expr]:
        return [*self.convolution.args, *(x for x in (self.bias, self.residual) if x is not None)]

    @property
    def candidates(self) -> list[str]:
        """The candidates; the first is used if nothing was measured."""
        others = [_SEPARATE, _FUSED] if self.has_relu else [_SEPARATE]
        if not patches.has_patches(self.convolution):
            return others
        # By default PyTorch allows TF32 in convolutions of float32, and not in products.
        is_half = str(self.convolution.ty.dtype) != "float32"
        is_simple = is_half and self.residual is None
        if is_simple or not patches.is_of_pixels(self.convolution):
            return [_PRODUCT, *others]
        return [*others, _PRODUCT]


@compiler_pass
class FuseConvolutions(PyExprMutator):
    """Compute each chain in the way that was measured to be the fastest."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.values, self.readers = values_and_readers(ir_mod["main"])
        #: By the last call of each chain. A convolution is only in the longest chain that it
        #: begins.
        self.chains: dict[relax.Call, _Chain] = {}
        taken: set[relax.Call] = set()
        for find in (self.ending_in_relu, self.ending_in_bias, _alone):
            for value in self.values.values():
                chain = find(value)
                if chain and chain.convolution not in taken and self.is_ours(chain):
                    taken.add(chain.convolution)
                    self.chains[value] = chain

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace the end of a chain; the rest of it is dead code then."""
        chain = self.chains.get(op)
        if chain is None:
            return super().visit_call_(op)
        form = choose(_workload(chain), chain.candidates, lambda: _sample(chain))
        if form == _SEPARATE:
            return super().visit_call_(op)
        x, weight, *others = (self.visit_expr(operand) for operand in chain.operands)
        if others:
            others[0] = self.flat(others[0], x.ty.dtype)
        compute = _product if form == _PRODUCT else _fused
        result = compute(self.builder_, chain, [x, weight, *others])
        return result if op.ty.dtype == x.ty.dtype else relax.op.astype(result, op.ty.dtype)

    def flat(self, bias: Expr, dtype: Any) -> Expr:
        """Return a bias in the form that libraries take."""
        bias = self.builder_.emit(relax.op.reshape(bias, [static_shape(bias)[-1]]))
        same = bias.ty.dtype == dtype
        return bias if same else self.builder_.emit(relax.op.astype(bias, dtype))

    def ending_in_relu(self, value: Expr) -> _Chain | None:
        """Return the chain that a ReLU ends."""
        if not is_call(_RELU, value):
            return None
        total = self.uncast(value_read_once(value.args[0], self.values, self.readers))
        found = self.biased(total)
        if found is not None:
            return _Chain(*found, has_relu=True)
        if total is None or not is_call(_ADD, total):
            return None
        for x, other in (total.args, reversed(total.args)):
            found = self.biased(value_read_once(x, self.values, self.readers))
            if found is not None and static_shape(other) == static_shape(value):
                source = self.values.get(other)
                residual = source.args[0] if is_call(_ASTYPE, source) else other
                return _Chain(*found, residual, has_relu=True)
        return None

    def ending_in_bias(self, value: Expr) -> _Chain | None:
        """Return the chain that an addition ends, or a cast of it to the type of the images."""
        found = self.biased(value)
        if found is None or value.ty.dtype != found[0].ty.dtype:
            return None
        return _Chain(*found)

    def is_ours(self, chain: _Chain) -> bool:
        """Whether there are several ways to compute a chain, and its operands suit all of them."""
        bias, convolution = chain.bias, chain.convolution
        images = [x for x in (*convolution.args, convolution, chain.residual) if x is not None]
        dtypes = {str(x.ty.dtype) for x in images}
        return (
            len(dtypes) == 1
            and dtypes <= FLOAT_DTYPES
            and _is_plain(convolution)
            and (bias is None or is_weight(self.builder_, bias))
            and len(chain.candidates) > 1
        )

    def biased(self, value: Expr | None) -> tuple[relax.Call, Expr] | None:
        """Return a convolution and its bias, perhaps added in float32."""
        value = self.uncast(value)
        if not is_call(_ADD, value):
            return None
        for x, bias in (value.args, reversed(value.args)):
            convolution = self.uncast(value_read_once(x, self.values, self.readers))
            if is_call(_CONVOLUTION, convolution) and _is_bias(bias, static_shape(convolution)):
                return convolution, bias
        return None

    def uncast(self, value: Expr | None) -> Expr | None:
        """Return the operand of a cast, or the value itself."""
        while is_call(_ASTYPE, value):
            value = value_read_once(value.args[0], self.values, self.readers)
        return value


def _alone(value: Expr) -> _Chain | None:
    return _Chain(value) if is_call(_CONVOLUTION, value) else None


def _is_bias(x: Expr, shape: Sequence[int]) -> bool:
    return static_shape(x) in ([1, 1, 1, shape[-1]], [shape[-1]])


def _is_plain(convolution: relax.Call) -> bool:
    attributes = convolution.attrs
    top, left, bottom, right = (int(size) for size in attributes.padding)
    layouts = str(attributes.data_layout), str(attributes.kernel_layout)
    return (top, left) == (bottom, right) and layouts == ("NHWC", "OHWI")


def _product(builder: relax.BlockBuilder, chain: _Chain, operands: Sequence[Expr]) -> relax.Expr:
    x, weight, *others = operands
    bias, *residual = others or [None]
    shape, has_relu = static_shape(chain.convolution), chain.has_relu and not residual
    result = patches.multiply(builder, x, weight, bias, shape=shape, has_relu=has_relu)
    for other in residual:
        result = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(result, other))))
    return result


def _fused(builder: relax.BlockBuilder, chain: _Chain, operands: Sequence[Expr]) -> relax.Expr:
    attributes = chain.convolution.attrs

    def body(record: Aten, x: Any, weight: Any, bias: Any, *residual: Any) -> Any:
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

    dtype = str(operands[0].ty.dtype)
    return builder.emit(aten(operands, static_shape(chain.convolution), dtype, body))


def _workload(chain: _Chain) -> str:
    convolution = chain.convolution
    attributes = convolution.attrs
    sizes = " by ".join("x".join(map(str, static_shape(x))) for x in convolution.args)
    how = ["strides", "padding", "dilation"]
    numbers = " ".join(f"{name} {[int(n) for n in getattr(attributes, name)]}" for name in how)
    parts = {"bias": chain.bias, "residual": chain.residual, "relu": chain.has_relu or None}
    end = "".join(f" + {name}" for name, part in parts.items() if part is not None)
    return f"convolution {convolution.ty.dtype} {sizes} {numbers} of {attributes.groups}{end}"


def _sample(chain: _Chain) -> Sample:
    result = relax.TensorType(static_shape(chain.convolution), chain.convolution.ty.dtype)
    weights = (False, True, True, False)[: len(chain.operands)]
    types = [*(operand.ty for operand in chain.operands), result]
    return Sample(types, weights, functools.partial(_as_operators, chain))


def _as_operators(
    chain: _Chain, builder: relax.BlockBuilder, operands: Sequence[relax.Var]
) -> relax.Expr:
    x, weight, *others = operands
    value = builder.emit(relax.Call(_CONVOLUTION, [x, weight], chain.convolution.attrs))
    for other in others:
        if other.ty.dtype != value.ty.dtype:
            value = builder.emit(relax.op.astype(value, other.ty.dtype))
        value = builder.emit(relax.op.add(value, other))
    if value.ty.dtype != x.ty.dtype:
        value = builder.emit(relax.op.astype(value, x.ty.dtype))
    return builder.emit(relax.op.nn.relu(value)) if chain.has_relu else value
