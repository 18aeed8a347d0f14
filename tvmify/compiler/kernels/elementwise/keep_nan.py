"""Legalizers that treat NaN and signed zeros as eager does, unlike TVM's. TVM's maximum, minimum,
ReLU and pooling turn NaN into a number, its ``x * 0``, ``0 / x`` and ``x - x`` are 0, its ``x + 0``
and ``(x + y) - y`` are x, and its simplifier takes ``not (a < b)`` for ``a >= b``. A NaN fails
every comparison, so each function here is written such that a failed comparison keeps it; with SIMD
that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.relax.transform.legalize_ops.common import _try_convert_to_scalar_const
from tvm.tirx import FloatImm, IntImm

from tvmify.compiler import sizes
from tvmify.compiler.kernels.elementwise.scalar import elementwise

Scalar = Any


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger, the first of equal ones (zeros, say), or NaN if either is NaN."""
    if _is_bound(b):  # one comparison is enough
        return b if math.isnan(b.value) else tirx.Select(a < b, b, a)
    if _is_bound(a):
        return a if math.isnan(a.value) else tirx.Select(b <= a, a, b)
    return tirx.Select(_or_nan(a < b, b), b, a)


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """Return the smaller, the first of equal ones (zeros, say), or NaN if either is NaN."""
    if _is_bound(b):
        return b if math.isnan(b.value) else tirx.Select(a > b, b, a)
    if _is_bound(a):
        return a if math.isnan(a.value) else tirx.Select(b >= a, a, b)
    return tirx.Select(_or_nan(a > b, b), b, a)


def _is_bound(a: Scalar) -> bool:
    return isinstance(a, FloatImm)


def _or_nan(condition: Scalar, a: Scalar) -> Scalar:
    return tirx.any(condition, _is_nan(a)) if _is_float(a) else condition


def _is_nan(a: Scalar) -> Scalar:
    # TVM has no isnan of bfloat16.
    return tirx.isnan(tirx.Cast("float32", a) if str(a.ty.dtype) == "bfloat16" else a)


def _is_float(a: Scalar) -> bool:
    return "float" in str(a.ty.dtype)


def _relu(x: Scalar) -> Scalar:
    zero = tirx.const(0, str(x.ty.dtype))
    return tirx.Select(x < zero, zero, x)


def _unless_nan(a: Scalar, condition: Scalar) -> Scalar:
    # When fusion makes both sides the same value, the simplifier takes ``a == a`` for true.
    return (
        tirx.Select(_is_nan(a), tirx.const(False, "bool"), condition) if _is_float(a) else condition
    )


def _equal(a: Scalar, b: Scalar) -> Scalar:
    return _unless_nan(a, a == b)


def _greater_equal(a: Scalar, b: Scalar) -> Scalar:
    return _unless_nan(a, a >= b)


def _less_equal(a: Scalar, b: Scalar) -> Scalar:
    return _unless_nan(a, a <= b)


def _not_equal(a: Scalar, b: Scalar) -> Scalar:
    return _logical_not(_equal(a, b))


def _logical_not(x: Scalar) -> Scalar:
    return _flag(_bit(x) ^ tirx.const(1, "int8"))


def _logical_xor(a: Scalar, b: Scalar) -> Scalar:
    return _flag(_bit(a) ^ _bit(b))


def _bit(x: Scalar) -> Scalar:
    # Through an integer: a negation that the simplifier sees, it pushes into the comparison.
    return tirx.Cast("int8", x)


def _flag(bit: Scalar) -> Scalar:
    return tirx.Cast("bool", bit)


def _subtract(a: Scalar, b: Scalar) -> Scalar:
    # LLVM makes a subtraction of it, and the simplifier nothing.
    return a + b * tirx.const(-1, str(b.ty.dtype)) if _is_float(a) else a - b


def _add(a: Scalar, b: Scalar) -> Scalar:
    return a + b


def _multiply(a: Scalar, b: Scalar) -> Scalar:
    return a * b


def _divide(a: Scalar, b: Scalar) -> Scalar:
    return tirx.div(a, b)


def _legalize(
    function: Callable[..., Scalar], *, hide: Callable[[Scalar], Scalar] | None = None
) -> Callable[..., relax.Expr]:
    """Make a legalizer of a function of scalars; constants become part of the kernel.

    Parameters
    ----------
    hide
        Writes a constant such that TVM's simplifier leaves it alone.
    """
    name = function.__name__.strip("_")

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        constants = [_constant(argument) for argument in call.args]
        if all(constant is not None for constant in constants):
            constants = [None] * len(constants)
        if hide is not None:
            constants = [None if constant is None else hide(constant) for constant in constants]
        tensors = [x for x, constant in zip(call.args, constants, strict=True) if constant is None]

        def element(*values: Scalar) -> Scalar:
            rest = iter(values)
            return function(*(next(rest) if c is None else c for c in constants))

        return bb.call_te(elementwise(element), *tensors, primfunc_name_hint=name)

    return legalize


def _constant(argument: relax.Expr) -> Scalar | None:
    value = _try_convert_to_scalar_const(argument)
    return value if isinstance(value, (FloatImm, IntImm)) else None


def hidden(value: Scalar) -> Scalar:
    """Write a zero as its bits, or as those of an integer, which TVM's simplifier leaves alone.

    It knows rules for zeros that do not hold for NaN, infinity and the other zero, and divides by
    none. LLVM, which keeps to arithmetic, sees a number again.
    """
    dtype = str(value.ty.dtype)
    if value.value != 0 or not dtype.startswith(("float", "bfloat", "int")):
        return value
    integer = _integer_of(dtype)
    # TVM takes the bits of a plain 0 for a pointer.
    zero = ~tirx.const(-1, integer)
    if not isinstance(value, FloatImm):
        return zero
    is_negative = math.copysign(1, value.value) < 0
    return tirx.reinterpret(dtype, te.min_value(integer) if is_negative else zero)


def _hidden_lowest(value: Scalar) -> Scalar:
    """Write the lowest integer as a complement.

    TVM's simplifier compares by the sign of ``x - lowest``, and computes it as ``x + lowest``.
    """
    if not isinstance(value, IntImm) or int(value) >= 0:
        return value
    dtype = str(value.ty.dtype)
    return ~te.max_value(dtype) if int(value) == int(te.min_value(dtype)) else value


def _integer_of(dtype: str) -> str:
    return dtype.replace("bfloat", "int").replace("float", "int")


def _legalize_reduction(largest: bool, fewest_bits: int = 0) -> Callable[..., relax.Expr]:
    """Reduce floats as integers in the same order, where NaN is one more number beyond infinity.

    Integer maxima and minima are reducers that TVM's schedules can split among lanes; one that
    tests for NaN is not. Integers have at least `fewest_bits`.
    """
    name = "max" if largest else "min"

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        axes = [int(axis) for axis in call.attrs.axis] if call.attrs.axis is not None else None
        reduce = topi.max if largest else topi.min
        keep = bool(call.attrs.keepdims)

        def compute(x: te.Tensor) -> te.Tensor:
            if "float" not in str(x.dtype):
                return reduce(x, axes, keep)
            order = _ordered_max if largest else _ordered_min
            dtype, integer = str(x.dtype), _integer_of(str(x.dtype))
            wide = f"int{max(fewest_bits, int(integer.removeprefix('int')))}"

            def ordered(value: Scalar) -> Scalar:
                return order(value).astype(wide)

            best = reduce(elementwise(ordered)(x), axes, keep)

            def element(*at: Scalar) -> Scalar:
                return _float_of(best(*at).astype(integer), dtype)

            return te.compute(best.shape, element, name=name)

        return bb.call_te(compute, call.args[0], primfunc_name_hint=name)

    return legalize


def _ordered_max(x: Scalar) -> Scalar:
    return _ordered(x, _nan(str(x.ty.dtype)))


def _ordered_min(x: Scalar) -> Scalar:
    return _ordered(x, ~_nan(str(x.ty.dtype)))


def _ordered(x: Scalar, of_nan: int) -> Scalar:
    """Return an integer; integers compare as their floats do, and NaN is given one beyond."""
    integer = _integer_of(str(x.ty.dtype))
    return tirx.Select(
        tirx.isnan(x), tirx.const(of_nan, integer), _flip_negative(tirx.reinterpret(integer, x))
    )


def _float_of(ordered: Scalar, dtype: str) -> Scalar:
    """Undo `_ordered`."""
    return tirx.reinterpret(dtype, _flip_negative(ordered))


def _nan(dtype: str) -> int:
    """Return the bits of the usual NaN; one of all bits would become zero in bfloat16."""
    width = int(dtype.removeprefix("float"))
    mantissa = {16: 10, 32: 23, 64: 52}[width]
    return (1 << (width - 1)) - (1 << (mantissa - 1))


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
    shape = sizes.sizes_of(call.ty.shape)

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


def _legalize_full(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    # TVM's own looks for "float" in a dtype that is not a string, and fails for NaN and infinity.
    shape, value = call.args
    return _filled(bb, call, shape, _try_convert_to_scalar_const(value, python_native=True))


def _legalize_zeros(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _filled(bb, call, call.args[0], 0)


def _filled(
    bb: relax.BlockBuilder, call: relax.Call, shape: relax.ShapeExpr, value: float
) -> relax.Expr:
    # What is fused behind it reads the number itself.
    number = hidden(tirx.const(value, str(call.ty.dtype)))

    def full() -> te.Tensor:
        return te.compute(shape.values, lambda *_: number, name="full")

    return bb.call_te(full, primfunc_name_hint="full")


def _lowest(dtype: str) -> Scalar:
    # TVM's least float is finite, but a window may hold nothing but minus infinity.
    return tirx.const(-math.inf, dtype) if "float" in dtype else te.min_value(dtype)


#: For ``relax.transform.LegalizeOps``.
KEEP_NAN: dict[str, Callable[..., relax.Expr]] = {
    "relax.add": _legalize(_add, hide=hidden),
    "relax.divide": _legalize(_divide, hide=hidden),
    "relax.equal": _legalize(_equal, hide=_hidden_lowest),
    "relax.full": _legalize_full,
    "relax.greater_equal": _legalize(_greater_equal, hide=_hidden_lowest),
    "relax.less_equal": _legalize(_less_equal, hide=_hidden_lowest),
    "relax.logical_not": _legalize(_logical_not),
    "relax.logical_xor": _legalize(_logical_xor),
    "relax.max": _legalize_reduction(largest=True),
    "relax.maximum": _legalize(maximum),
    "relax.min": _legalize_reduction(largest=False),
    "relax.minimum": _legalize(minimum),
    "relax.multiply": _legalize(_multiply, hide=hidden),
    "relax.nn.max_pool2d": _legalize_max_pool,
    "relax.nn.max_pool3d": _legalize_max_pool,
    "relax.nn.relu": _legalize(_relu),
    "relax.not_equal": _legalize(_not_equal, hide=_hidden_lowest),
    "relax.subtract": _legalize(_subtract, hide=hidden),
    "relax.zeros": _legalize_zeros,
}
#: The extremes for GPUs: threads of a warp exchange 32 bits. Narrower ones would go through shared
#: memory, by code of TVM's that relies on threads being in step.
KEEP_NAN_IN_WARPS = {
    "relax.max": _legalize_reduction(True, fewest_bits=32),
    "relax.min": _legalize_reduction(False, fewest_bits=32),
}
