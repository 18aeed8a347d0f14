"""Convolutions and products by cuDNN and cuBLAS, norms and the like by PyTorch's own kernels.

Each becomes a call of ``tvmify.aten`` (see `tvmify.compiler.aten`) with a small graph, in which
permutations are views: a contiguous tensor in the program's layout, channels last, is one of
``torch.channels_last`` to PyTorch, and goes in and comes out without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.aten.calls import Aten, aten, multiply
from tvmify.compiler.cuda.norms import norm
from tvmify.compiler.cuda.products import by_kernel
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call, linear, values_and_readers
from tvmify.compiler.passes.views import is_transpose, static_shape

#: Integers they do not multiply.
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
_HALF = frozenset({"float16", "bfloat16"})
_ASTYPE = tvm.ir.Op.get("relax.astype")
#: PyTorch's layouts, whatever the memory format.
_IMAGE, _FILTERS, _TRANSPOSED_FILTERS = "NCHW", "OIHW", "IOHW"


class _Calling(PyExprMutator):
    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.values, self.readers = values_and_readers(ir_mod["main"])
        products = filter(None, map(self.linear, self.values.values()))
        #: The call that is visited, with the arguments of the given program.
        self.visited: relax.Call
        #: Products that become part of an addition.
        self.taken = [product for product, _ in products]

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
        if any(op.same_as(product) for product in self.taken):
            return call  # its result is no longer read
        if (found := self.linear(op)) is not None:
            product, bias = found
            operands = [self.visit_expr(x) for x in (*product.args, bias)]
            return _product(self, operands[:2], static_shape(op), op.ty.dtype, operands[2:])
        if name == "relax.astype":
            source = self.narrow(call.args[0])
            return source if source is not None and source.ty.dtype == call.ty.dtype else call
        if name not in _CALLS or str(call.ty.dtype) not in _DTYPES:
            return call
        self.visited = op
        return _CALLS[name](self, call)

    def linear(self, value: Expr) -> tuple[relax.Call, Expr] | None:
        """Return a product and its bias, if a value is their sum; cuBLAS computes both."""
        found = linear(value, self.values, self.readers)
        return found if found is not None and str(value.ty.dtype) in _DTYPES else None

    def narrow(self, x: Expr) -> Expr | None:
        """Return the half-precision tensor that a tensor was cast from, if it was."""
        value = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        if not is_call(_ASTYPE, value) or str(value.ty.dtype) not in ("float32", "float64"):
            return None  # a cast of an integer loses digits
        source = value.args[0]
        return source if str(source.ty.dtype) in _HALF else None

    def in_half(self, call: relax.Call) -> list[Expr] | None:
        """Return the tensors of one half type that all arguments were cast from, if they were."""
        narrow = [source for source in map(self.narrow, call.args) if source is not None]
        dtypes = {str(source.ty.dtype) for source in narrow}
        is_half = len(narrow) == len(call.args) and len(dtypes) == 1
        return narrow if is_half and str(call.ty.dtype) == "float32" else None

    def replace(self, old: Expr, new: relax.Var, read: Expr) -> None:
        """Let what is visited from now on read another variable of the same value.

        `read` is its value in the program that is visited, or a cast of that.
        """
        value = self.values.get(read)
        if self.visit_expr(read).same_as(old):
            self.set_var_remap(read, new)
        elif is_call(_ASTYPE, value) and self.visit_expr(value.args[0]).same_as(old):
            self.set_var_remap(value.args[0], new)
            cast = self.builder_.emit(relax.op.astype(new, read.ty.dtype))
            self.set_var_remap(read, cast)

    def transposed(self, x: Expr) -> tuple[Expr, bool]:
        """Return a matrix as stored in memory, and whether it is transposed there."""
        value = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        return (value.args[0], True) if is_transpose(value) else (x, False)


@compiler_pass
class CallLibraries(_Calling):
    """Let PyTorch compute the operators of `_CALLS`."""


def _matmul(calling: _Calling, call: relax.Call) -> relax.Expr:
    return _product(calling, call.args, static_shape(call), call.ty.dtype, [])


def _product(
    calling: _Calling,
    factors: Sequence[Expr],
    shape: list[int],
    dtype: Any,
    bias: list[Expr],
) -> relax.Expr:
    # A weight is not transposed: cuBLAS takes either order.
    operands, transposed = zip(*(calling.transposed(x) for x in factors), strict=True)
    if not transposed[0]:
        made = by_kernel(calling.builder_, *operands, transposed[1], bias, shape)
        if made is not None:
            return made

    def body(record: Aten, left: Any, right: Any, *shift: Any) -> Any:
        left = record("transpose", left, -2, -1) if transposed[0] else left
        return multiply(record, left, right, *shift, transposed=transposed[1])

    return aten([*operands, *bias], shape, str(dtype), body)


def _conv2d(calling: _Calling, call: relax.Call) -> relax.Expr:
    attributes = call.attrs
    top, left, bottom, right = (int(size) for size in attributes.padding)
    is_even = (top, left) == (bottom, right)

    def body(record: Aten, x: Any, weight: Any) -> Any:
        x = record("permute", x, _axes(attributes.data_layout, _IMAGE))
        weight = record("permute", weight, _axes(attributes.kernel_layout, _FILTERS))
        if not is_even:
            x = record("constant_pad_nd", x, [left, right, top, bottom], 0.0)
        padding = [top, left] if is_even else [0, 0]
        return _convolved(record, x, weight, attributes, padding, None)

    return aten(call.args, static_shape(call), str(call.ty.dtype), body)


def _conv2d_transpose(calling: _Calling, call: relax.Call) -> relax.Expr:
    attributes = call.attrs
    x, weight = call.args
    # In the layout that PyTorch would create in each call; here they are packed.
    order = _axes(attributes.kernel_layout, "IHWO")
    weight = calling.builder_.emit(relax.op.permute_dims(weight, order))
    top, left, *_ = (int(size) for size in attributes.padding)

    def body(record: Aten, x: Any, weight: Any) -> Any:
        x = record("permute", x, _axes(attributes.data_layout, _IMAGE))
        weight = record("permute", weight, _axes("IHWO", _TRANSPOSED_FILTERS))
        return _convolved(
            record, x, weight, attributes, [top, left], _numbers(attributes.output_padding)
        )

    return aten([x, weight], static_shape(call), str(call.ty.dtype), body)


def _convolved(
    record: Aten, x: Any, weight: Any, attributes: Any, padding: list[int], extra: list[int] | None
) -> Any:
    """Add the convolution; a transposed one if `extra`, the padding of its output, is given."""
    result = record(
        "convolution",
        x,
        weight,
        None,
        _numbers(attributes.strides),
        padding,
        _numbers(attributes.dilation),
        extra is not None,
        extra or [0, 0],
        int(attributes.groups),
    )
    layout = attributes.out_layout or attributes.data_layout
    return record("permute", result, _axes(_IMAGE, layout))


def _layer_norm(calling: _Calling, call: relax.Call) -> relax.Expr:
    rank, axes = len(static_shape(call)), [int(axis) for axis in call.attrs.axes]
    if sorted(axis % rank for axis in axes) != list(range(rank - len(axes), rank)):
        return call
    sizes, epsilon = static_shape(call)[rank - len(axes) :], float(call.attrs.epsilon)

    def body(record: Aten, x: Any, scale: Any, shift: Any) -> Any:
        return record("layer_norm", x, sizes, scale, shift, epsilon, False)

    operands = calling.in_half(call) or call.args
    made = norm(calling.builder_, *operands, epsilon) if len(axes) == 1 else None
    if made is None:
        return _in_half(calling, call, body)
    total, normed = made
    if not total.same_as(operands[0]):
        calling.replace(operands[0], total, calling.visited.args[0])
    return normed if normed.ty.dtype == call.ty.dtype else relax.op.astype(normed, call.ty.dtype)


def _softmax(calling: _Calling, call: relax.Call) -> relax.Expr:
    name, axis = call.op.name.rpartition(".")[2], int(call.attrs.axis)

    def body(record: Aten, x: Any) -> Any:
        return record(name, x, axis, None)

    return _in_half(calling, call, body)


def _reduction(calling: _Calling, call: relax.Call) -> relax.Expr:
    """Reduce all elements to one by PyTorch, with many blocks; TVM's rules would take a single one.

    They fail if anything is fused behind it, since the kernel then has no loops.
    """
    shape, name = static_shape(call), call.op.name.rpartition(".")[2]
    if math.prod(shape) != 1 or math.prod(static_shape(call.args[0])) < 2:
        return call

    def body(record: Aten, x: Any) -> Any:
        if name in ("max", "min"):
            result = record(f"a{name}", x, [*range(len(static_shape(call.args[0])))], False)
        else:
            result = record(name, x, None)
        return record("reshape", result, shape) if shape else result

    return aten(call.args, shape, str(call.ty.dtype), body)


def _in_half(calling: _Calling, call: relax.Call, body: Callable[..., Any]) -> relax.Expr:
    """Let the kernel read and write a half type, and compute in float32, as in eager."""
    narrow = calling.in_half(call)
    if narrow is None:
        return aten(call.args, static_shape(call), str(call.ty.dtype), body)
    dtype = str(narrow[0].ty.dtype)
    result = calling.builder_.emit(aten(narrow, static_shape(call), dtype, body))
    return relax.op.astype(result, "float32")


_CALLS: dict[str, Callable[[_Calling, relax.Call], relax.Expr]] = {
    "relax.matmul": _matmul,
    "relax.max": _reduction,
    "relax.mean": _reduction,
    "relax.min": _reduction,
    "relax.nn.conv2d": _conv2d,
    "relax.nn.conv2d_transpose": _conv2d_transpose,
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.log_softmax": _softmax,
    "relax.nn.softmax": _softmax,
    "relax.sum": _reduction,
}


def _axes(source: str, target: str) -> list[int]:
    """Return the permutation from one layout to another."""
    return [str(source).index(letter) for letter in str(target)]


def _numbers(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values]
