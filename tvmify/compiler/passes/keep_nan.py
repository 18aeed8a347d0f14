"""Lowerings that treat NaN as eager does, in place of TVM's own.

TVM's maximum, minimum, ReLU and pooling turn NaN into a number, its ``x * 0`` is 0, and its
simplifier takes ``not (a < b)`` for ``a >= b``. A NaN fails every comparison, so each function here
asks the question whose "no" keeps it; in SIMD that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.relax.transform.legalize_ops.common import _try_convert_to_scalar_const
from tvm.tirx import FloatImm, IntImm

from tvmify.compiler.converters.scalar import elementwise

Scalar = Any


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger, or NaN if either is NaN."""
    return tirx.Select(_or_nan(a > b, a), a, b)


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """Return the smaller, or NaN if either is NaN."""
    return tirx.Select(_or_nan(a < b, a), a, b)


def _or_nan(condition: Scalar, a: Scalar) -> Scalar:
    return tirx.any(condition, tirx.isnan(a)) if "float" in str(a.ty.dtype) else condition


def _relu(x: Scalar) -> Scalar:
    zero = tirx.const(0, str(x.ty.dtype))
    return tirx.Select(x < zero, zero, x)


def _legalize_extremum(function: Callable[[Scalar, Scalar], Scalar]) -> Callable[..., relax.Expr]:
    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        a, b = (_try_convert_to_scalar_const(argument) for argument in call.args)
        if isinstance(a, (FloatImm, IntImm)):
            a, b = b, a
        if isinstance(b, (FloatImm, IntImm)):
            # A bound, never NaN: one comparison is enough.
            return bb.call_te(
                elementwise(lambda x: _bounded(x, b, function is maximum)),
                a,
                primfunc_name_hint=function.__name__,
            )
        return bb.call_te(elementwise(function), a, b, primfunc_name_hint=function.__name__)

    return legalize


def _legalize_product(
    function: Callable[..., te.Tensor], name: str
) -> Callable[..., relax.Expr]:
    """Legalize as TVM does, but for a constant zero: TVM says ``x * 0 = 0``, even where x is NaN."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        arguments = [_try_convert_to_scalar_const(argument) for argument in call.args]
        if any(isinstance(a, FloatImm) and a.value == 0 for a in arguments):
            arguments = list(call.args)
        if not any(isinstance(a, relax.Expr) for a in arguments):
            arguments[0] = call.args[0]
        return bb.call_te(function, *arguments, primfunc_name_hint=name)

    return legalize


def _logical_not(x: Scalar) -> Scalar:
    return _flag(_bit(x) ^ tirx.const(1, "int8"))


def _logical_xor(x: Scalar, y: Scalar) -> Scalar:
    return _flag(_bit(x) ^ _bit(y))


def _not_equal(x: Scalar, y: Scalar) -> Scalar:
    return _flag(_bit(x == y) ^ tirx.const(1, "int8"))


def _bit(x: Scalar) -> Scalar:
    # Through an integer: a negation that the simplifier sees, it pushes into the comparison.
    return tirx.Cast("int8", x)


def _flag(bit: Scalar) -> Scalar:
    return tirx.Cast("bool", bit)


def _legalize_elementwise(function: Callable[..., Scalar], name: str) -> Callable[..., relax.Expr]:
    compute = elementwise(function)

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return bb.call_te(compute, *call.args, primfunc_name_hint=name)

    return legalize


def _bounded(x: Scalar, bound: Scalar, below: bool) -> Scalar:
    return tirx.Select(x < bound if below else x > bound, bound, x)


def _legalize_reduction(largest: bool) -> Callable[..., relax.Expr]:
    """Reduce floats as integers in the same order, where NaN is one more number beyond infinity.

    Integer maxima and minima are reducers that TVM's schedules can split among lanes; one that
    tests for NaN is not.
    """
    name = "max" if largest else "min"

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        axes = [int(axis) for axis in call.attrs.axis] if call.attrs.axis is not None else None
        reduce = topi.max if largest else topi.min
        keep = bool(call.attrs.keepdims)

        def compute(x: te.Tensor) -> te.Tensor:
            if "float" not in str(x.dtype):
                return reduce(x, axes, keep)
            ordered = elementwise(_ordered_max if largest else _ordered_min)(x)
            best = reduce(ordered, axes, keep)
            return te.compute(best.shape, lambda *i: _float_of(best(*i), str(x.dtype)), name=name)

        return bb.call_te(compute, call.args[0], primfunc_name_hint=name)

    return legalize


def _ordered_max(x: Scalar) -> Scalar:
    return _ordered(x, te.max_value)


def _ordered_min(x: Scalar) -> Scalar:
    return _ordered(x, te.min_value)


def _ordered(x: Scalar, of_nan: Callable[[str], Scalar]) -> Scalar:
    """Return an integer; integers compare as their floats do, and NaN is the given extreme."""
    integer = str(x.ty.dtype).replace("bfloat", "int").replace("float", "int")
    return tirx.Select(tirx.isnan(x), of_nan(integer), _flip_negative(tirx.reinterpret(integer, x)))


def _float_of(ordered: Scalar, dtype: str) -> Scalar:
    """Undo `_ordered`; both extremes of the integers are the bits of a NaN."""
    return tirx.reinterpret(dtype, _flip_negative(ordered))


def _flip_negative(bits: Scalar) -> Scalar:
    # Sign and magnitude to two's complement and back: of a negative, all bits but the sign turn.
    integer = str(bits.ty.dtype)
    width = int(integer.removeprefix("int"))
    return bits ^ ((bits >> tirx.const(width - 1, integer)) & te.max_value(integer))


def _legalize_max_pool(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    size, stride, dilation, padding = (
        [int(v) for v in values]
        for values in (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)
    )
    rank = len(size)
    axes = [str(attrs.layout).index(letter) for letter in "DHW"[-rank:]]
    shape = [int(extent) for extent in call.ty.shape]

    def compute(x: te.Tensor) -> te.Tensor:
        window = [te.reduce_axis((0, k), f"k{i}") for i, k in enumerate(size)]
        before = [0] * len(shape)
        after = [0] * len(shape)
        for i, axis in enumerate(axes):
            before[axis], after[axis] = padding[i], padding[rank + i]
        largest = te.comm_reducer(maximum, _lowest, name="largest")
        worst = _lowest(str(x.dtype))
        padded = topi.nn.pad(x, before, after, worst) if any(padding) else x

        def element(*indices: Scalar) -> Scalar:
            at = list(indices)
            for i, axis in enumerate(axes):
                at[axis] = indices[axis] * stride[i] + window[i] * dilation[i]
            return largest(padded(*at), axis=window)

        return te.compute(shape, element, name="max_pool")

    return bb.call_te(compute, call.args[0], primfunc_name_hint="max_pool")


def _lowest(dtype: str) -> Scalar:
    # TVM's least float is finite, but a window may hold nothing but minus infinity.
    return tirx.const(-math.inf, dtype) if "float" in dtype else te.min_value(dtype)


#: For ``relax.transform.LegalizeOps``.
KEEP_NAN: dict[str, Callable[..., relax.Expr]] = {
    "relax.divide": _legalize_product(topi.divide, "divide"),
    "relax.logical_not": _legalize_elementwise(_logical_not, "logical_not"),
    "relax.logical_xor": _legalize_elementwise(_logical_xor, "logical_xor"),
    "relax.max": _legalize_reduction(largest=True),
    "relax.maximum": _legalize_extremum(maximum),
    "relax.min": _legalize_reduction(largest=False),
    "relax.minimum": _legalize_extremum(minimum),
    "relax.multiply": _legalize_product(topi.multiply, "multiply"),
    "relax.nn.max_pool2d": _legalize_max_pool,
    "relax.nn.max_pool3d": _legalize_max_pool,
    "relax.nn.relu": _legalize_elementwise(_relu, "relu"),
    "relax.not_equal": _legalize_elementwise(_not_equal, "not_equal"),
}
