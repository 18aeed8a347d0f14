"""Products of one row with a weight, as in decoders: by cuBLAS, or by a kernel of TVM.

They read the weight once, and do little else: no library is faster than memory, and a kernel can
fuse the bias, the activation and other epilogues. So the kernel is used, unless the library was
measured to be faster, or threads cannot share a row evenly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import tvm
from tvm import relax, te
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.costs import GPU
from tvmify.compiler.cuda.gpus import FLOAT_DTYPES
from tvmify.compiler.cuda.row_products import ROW_PRODUCT, Shape
from tvmify.compiler.kernels.common.choice import choose
from tvmify.compiler.kernels.common.legalizing import accumulator, is_weight
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call, value_read_once, values_and_readers
from tvmify.compiler.passes.views import static_shape

#: The candidates.
_LIBRARY, _KERNEL = "library", "kernel"
#: The fewest elements of a row: TVM's last rule is wrong for sums of one element.
_SHORTEST = 32
_ADD, _ASTYPE, _MATMUL, _RESHAPE = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("add", "astype", "matmul", "reshape")
)


@compiler_pass
class ReshapeRows(PyExprMutator):
    """Reshape a row before its product rather than after it: nothing is fused across a reshape."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.values, self.readers = values_and_readers(ir_mod["main"])

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Reshape the factors of a product instead of its result."""
        call = super().visit_call_(op)
        product = (
            value_read_once(op.args[0], self.values, self.readers)
            if is_call(_RESHAPE, op)
            else None
        )
        casts, bias = [], []
        while is_call(_ASTYPE, product):
            casts.append(product.ty.dtype)
            product = value_read_once(product.args[0], self.values, self.readers)
        if is_call(_ADD, product):
            variable, *bias = product.args
            product = value_read_once(variable, self.values, self.readers)
        if not (
            is_call(_MATMUL, product)
            and len(static_shape(product.args[1])) == 2
            and all(len(static_shape(shift)) == 1 for shift in bias)
            and _is_row(static_shape(product))
            and _is_row(static_shape(op))
            and static_shape(op)[-1] == static_shape(product)[-1]
            and static_shape(product.args[0])[-1] >= _SHORTEST
        ):
            return call
        row, weight, *shifts = (self.visit_expr(x) for x in (*product.args, *bias))
        row = self.builder_.emit(
            relax.op.reshape(row, [*static_shape(op)[:-1], static_shape(row)[-1]])
        )
        result = relax.Call(_MATMUL, [row, weight], product.attrs)
        for shift in shifts:
            result = relax.op.add(self.builder_.emit(result), shift)
        for dtype in reversed(casts):
            result = relax.op.astype(self.builder_.emit(result), dtype)
        return result


def by_kernel(
    builder: relax.BlockBuilder,
    left: Expr,
    right: Expr,
    is_transposed: bool,
    bias: Sequence[Expr],
    shape: Sequence[int],
) -> Expr | None:
    """Return a product as a loop for TVM; None if a library is to compute it.

    Parameters
    ----------
    left, right
        The second is a matrix as stored in memory.
    is_transposed
        Whether it is transposed there: with a row for each column of the result.
    bias
        One, or none.
    shape
        The shape of the result.
    """
    dtype = str(left.ty.dtype)
    operands = [left, right, *bias]
    if not (
        len(static_shape(right)) == 2
        and _is_row(shape)
        and dtype in FLOAT_DTYPES
        and all(str(operand.ty.dtype) == dtype for operand in operands)
        and math.prod(static_shape(right)) >= GPU.launch_bound
        and static_shape(left)[-1] >= _SHORTEST
        and all(is_weight(builder, operand) for operand in operands[1:])
    ):
        return None
    sizes = "x".join(map(str, static_shape(right)))
    order = " transposed" if is_transposed else ""
    workload = f"row {dtype} {sizes}{order} of {len(shape)} axes{' + bias' * len(bias)}"

    def sample() -> Sample:
        types = [*(operand.ty for operand in operands), relax.TensorType(shape, dtype)]
        weights = (False, *(True for _ in operands[1:]))
        return Sample(types, weights, functools.partial(_as_operators, is_transposed))

    is_even = Shape.of(shape[-1], static_shape(left)[-1], dtype) is not None
    candidates = (_KERNEL, _LIBRARY) if is_even else (_LIBRARY, _KERNEL)
    if choose(workload, candidates, sample) == _LIBRARY:
        return None
    if not is_transposed:
        right = builder.emit(relax.op.permute_dims(right))  # packed in this form
    wide = accumulator(dtype)
    product = builder.emit(
        builder.call_te(
            _row_product,
            left,
            right,
            wide,
            primfunc_name_hint=ROW_PRODUCT,
            primfunc_attrs=Pattern.FUSIBLE.attributes,
        )
    )
    for shift in bias:
        product = builder.emit(relax.op.add(product, _as(wide, shift)))
    return _as(dtype, product)


def _is_row(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and math.prod(shape[:-1]) == 1


def _as(dtype: str, x: Expr) -> Expr:
    return x if str(x.ty.dtype) == dtype else relax.op.astype(x, dtype)


def _row_product(left: te.Tensor, right: te.Tensor, wide: str) -> te.Tensor:
    """Multiply the row of the left-hand side with each row of the right-hand side."""
    before = [0] * (len(left.shape) - 1)
    along = te.reduce_axis((0, left.shape[-1]), "along")

    def element(*at: te.Var) -> Expr:
        factors = left[(*before, along)].astype(wide), right[at[-1], along].astype(wide)
        return te.sum(factors[0] * factors[1], axis=along)

    return te.compute((*left.shape[:-1], right.shape[0]), element, name=ROW_PRODUCT)


def _as_operators(
    is_transposed: bool, builder: relax.BlockBuilder, operands: Sequence[relax.Var]
) -> relax.Expr:
    left, right, *bias = operands
    if is_transposed:
        right = builder.emit(relax.op.permute_dims(right))
    product = builder.emit(relax.op.matmul(left, right))
    for shift in bias:
        product = builder.emit(relax.op.add(product, shift))
    return product
