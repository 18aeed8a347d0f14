"""Element-wise arithmetic, comparison, logic, activations and casts.

Each follows torch's type promotion: the arguments are cast to the dtype that torch computes in
(float32 for half precision), then the result to the dtype that torch returns. A number that meets
half precision is rounded to it first, as in torch, but not a factor or a divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from tvm import relax, tirx

from tvmify.compiler.aten.operators import arguments, base_name
from tvmify.compiler.frontend.constants import constant_of
from tvmify.compiler.frontend.converters.promotion import promoted
from tvmify.compiler.frontend.converters.registry import converts, dtype_of
from tvmify.compiler.kernels.elementwise import scalar
from tvmify.compiler.kernels.elementwise.scalar import elementwise
from tvmify.compiler.sizes import bounds, is_static
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import wrapped

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

#: Computed in the dtype of the arguments; bools as 8-bit integers.
SAME = {
    "abs.default": relax.op.abs,
    "ceil.default": relax.op.ceil,
    "floor.default": relax.op.floor,
    "maximum.default": relax.op.maximum,
    "minimum.default": relax.op.minimum,
    "mul.Scalar": relax.op.multiply,
    "mul.Tensor": relax.op.multiply,
    "relu.default": relax.op.nn.relu,
    "trunc.default": relax.op.trunc,
}
#: Integers become the default float dtype.
FLOAT = {
    "acos.default": relax.op.acos,
    "acosh.default": relax.op.acosh,
    "asin.default": relax.op.asin,
    "asinh.default": relax.op.asinh,
    "atan.default": relax.op.atan,
    "atanh.default": relax.op.atanh,
    "cos.default": relax.op.cos,
    "div.Scalar": relax.op.divide,
    "div.Tensor": relax.op.divide,
    "erf.default": relax.op.erf,
    "exp.default": relax.op.exp,
    "log.default": relax.op.log,
    "rsqrt.default": relax.op.rsqrt,
    "sigmoid.default": relax.op.sigmoid,
    "sin.default": relax.op.sin,
    "sqrt.default": relax.op.sqrt,
    "tan.default": relax.op.tan,
    "tanh.default": relax.op.tanh,
}
#: Indices of the arguments that torch does not round to half precision, if they are numbers.
EXACT = {relax.op.multiply: (0, 1), relax.op.divide: (1,)}
#: The result is a boolean.
BOOLEAN = {
    "eq.Scalar": relax.op.equal,
    "eq.Tensor": relax.op.equal,
    "ge.Scalar": relax.op.greater_equal,
    "ge.Tensor": relax.op.greater_equal,
    "gt.Scalar": relax.op.greater,
    "gt.Tensor": relax.op.greater,
    "isinf.default": relax.op.isinf,
    "isnan.default": relax.op.isnan,
    "le.Scalar": relax.op.less_equal,
    "le.Tensor": relax.op.less_equal,
    "lt.Scalar": relax.op.less,
    "lt.Tensor": relax.op.less,
    "ne.Scalar": relax.op.not_equal,
    "ne.Tensor": relax.op.not_equal,
}
#: Arguments are converted to bool.
LOGICAL = {
    "logical_and.default": relax.op.logical_and,
    "logical_not.default": relax.op.logical_not,
    "logical_or.default": relax.op.logical_or,
    "logical_xor.default": relax.op.logical_xor,
}


def _pointwise(
    function: Callable[..., relax.Expr], kind: PROMOTION, exact: Sequence[int]
) -> Callable[..., relax.Expr]:
    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        return function(*promoted(importer, node.args, kind, exact=exact))

    return convert


for _names, _kind in (
    (SAME, PROMOTION.DEFAULT),
    (FLOAT, PROMOTION.INT_TO_FLOAT),
    (BOOLEAN, PROMOTION.ALWAYS_BOOL),
):
    for _name, _function in _names.items():
        converts(_name)(_pointwise(_function, _kind, EXACT.get(_function, ())))


@converts("neg.default")
def negative(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args, PROMOTION.DEFAULT)
    if dtype_of(x).startswith("uint"):  # TVM multiplies by -1
        return relax.op.subtract(relax.const(0, dtype_of(x)), x)
    return relax.op.negative(x)


@converts("atan2.default")
def arc_tangent(importer: Importer, node: fx.Node) -> relax.Expr:
    x, y = promoted(importer, node.args, PROMOTION.INT_TO_FLOAT)
    return importer.emit_te(elementwise(tirx.atan2), x, y)


@converts("fmax.default", "fmin.default")
def extremum_of_numbers(importer: Importer, node: fx.Node) -> relax.Expr:
    """The larger or the smaller of two; the other one, if one is NaN."""
    x, y = promoted(importer, node.args, PROMOTION.DEFAULT)
    is_largest = base_name(node) == "fmax"
    if not _is_float(x):
        return (relax.op.maximum if is_largest else relax.op.minimum)(x, y)

    def compute(x: scalar.Scalar, y: scalar.Scalar) -> scalar.Scalar:
        return tirx.Select(tirx.any(x < y if is_largest else x > y, tirx.isnan(x)), y, x)

    return importer.emit_te(elementwise(compute), x, y)


def _logical(function: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        return function(*(importer.tensor(argument, torch.bool) for argument in node.args))

    return convert


for _name, _function in LOGICAL.items():
    converts(_name)(_logical(_function))


@converts("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def add(importer: Importer, node: fx.Node) -> relax.Expr:
    x, y = promoted(importer, node.args[:2], PROMOTION.DEFAULT)
    is_sum = base_name(node) == "add"
    alpha = wrapped(importer.argument(node, "alpha"), node.meta["val"].dtype)
    if alpha == 1:
        return (relax.op.add if is_sum else relax.op.subtract)(x, y)
    scaled = relax.op.multiply(y, importer.number(alpha if is_sum else -alpha, dtype_of(y)))
    return relax.op.add(x, scaled)


@converts("div.Tensor_mode", "div.Scalar_mode", "floor_divide.default")
def divide(importer: Importer, node: fx.Node) -> relax.Expr:
    """Division with a rounding mode."""
    mode = arguments(node).get("rounding_mode", "floor")  # `floor_divide` has no such argument
    kind = PROMOTION.INT_TO_FLOAT if mode is None else PROMOTION.DEFAULT
    divisor = _check_divisor(importer, node)
    x, y = promoted(importer, node.args[:2], kind, exact=EXACT[relax.op.divide])
    if divisor == -1:
        return relax.op.negative(x)
    if mode is None:
        return relax.op.divide(x, y)
    if _is_float(x):
        # As in torch, by the exact remainder, since a rounded quotient may be too large by one.
        return importer.emit_te(
            elementwise(scalar.floor_divide)
            if mode == "floor"
            else elementwise(scalar.trunc_divide),
            x,
            y,
        )
    return importer.emit_te(elementwise(tirx.floordiv if mode == "floor" else tirx.truncdiv), x, y)


@converts("remainder.Tensor", "remainder.Scalar")
def remainder(importer: Importer, node: fx.Node) -> relax.Expr:
    """The remainder with the sign of the divisor."""
    divisor = _check_divisor(importer, node)
    x, y = promoted(importer, node.args[:2], PROMOTION.DEFAULT)
    if divisor == -1:
        return relax.op.zeros_like(x)
    return importer.emit_te(elementwise(scalar.remainder if _is_float(x) else tirx.floormod), x, y)


@converts("fmod.Tensor", "fmod.Scalar")
def fmod(importer: Importer, node: fx.Node) -> relax.Expr:
    """The remainder with the sign of the dividend."""
    divisor = _check_divisor(importer, node)
    x, y = promoted(importer, node.args[:2], PROMOTION.DEFAULT)
    if divisor == -1:
        return relax.op.zeros_like(x)
    return importer.emit_te(elementwise(scalar.fmod if _is_float(x) else tirx.truncmod), x, y)


@converts("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(importer: Importer, node: fx.Node) -> relax.Expr:
    x, y = promoted(importer, node.args[:2], PROMOTION.BOOL_TO_LONG)
    exponent = node.args[1]
    if exponent in (2, 3, 4):
        square = importer.emit(relax.op.multiply(x, x))
        return (
            square if exponent == 2 else relax.op.multiply(square, x if exponent == 3 else square)
        )
    if not _is_float(x):
        raise UnsupportedOperator(
            [str(node.target)], "its exponent is an integer other than 2, 3 and 4"
        )
    if exponent == 0.5:
        return relax.op.sqrt(x)
    if exponent == -0.5:
        return relax.op.divide(relax.const(1.0, dtype_of(x)), relax.op.sqrt(x))
    return importer.emit_te(elementwise(tirx.pow), x, y)


@converts("clamp.default", "clamp.Tensor", names=("min", "max"))
@converts("clamp_min.default", names=("min", None))
@converts("hardtanh.default", names=("min_val", "max_val"))
def clamp(importer: Importer, node: fx.Node, *, names: tuple[str, str | None]) -> relax.Expr:
    """Two comparisons, since ``relax.clip``, unknown to ConvertLayout, would cost transposes."""
    low, high = (None if name is None else importer.argument(node, name) for name in names)
    given = tuple(value for value in (node.args[0], low, high) if value is not None)
    x, *limits = promoted(importer, given, PROMOTION.DEFAULT)
    if low is not None:
        x = importer.emit(relax.op.maximum(x, limits.pop(0)))
    return relax.op.minimum(x, limits[0]) if high is not None else x


@converts("where.self")
def where(importer: Importer, node: fx.Node) -> relax.Expr:
    condition, x, y = node.args
    dtype = node.meta["val"].dtype
    return relax.op.where(
        importer.tensor(condition, torch.bool), importer.tensor(x, dtype), importer.tensor(y, dtype)
    )


@converts(*(f"{name}.default" for name in scalar.INTRINSICS))
def by_intrinsic(importer: Importer, node: fx.Node) -> relax.Expr:
    """Functions for which Relax has no operator, or only an inexact one."""
    kind = PROMOTION.DEFAULT if base_name(node) == "round" else PROMOTION.INT_TO_FLOAT
    (x,) = promoted(importer, node.args[:1], kind)
    if base_name(node) == "round" and not _is_float(x):
        return x
    return importer.emit_te(elementwise(scalar.INTRINSICS[base_name(node)]), x)


@converts("reciprocal.default")
def reciprocal(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args, PROMOTION.INT_TO_FLOAT)
    return relax.op.divide(relax.const(1.0, dtype_of(x)), x)


@converts("sign.default")
def sign(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args, PROMOTION.DEFAULT)
    dtype = dtype_of(x)
    zero = relax.const(0, dtype)
    positive = relax.op.astype(relax.op.greater(x, zero), dtype)
    return relax.op.subtract(positive, relax.op.astype(relax.op.less(x, zero), dtype))


@converts("gelu.default")
def gelu(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args[:1], PROMOTION.DEFAULT)
    tanh = importer.argument(node, "approximate") == "tanh"
    return relax.op.nn.gelu_tanh(x) if tanh else relax.op.nn.gelu(x)


@converts("silu.default")
def silu(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args, PROMOTION.DEFAULT)
    return relax.op.nn.silu(x)


@converts("mish.default")
def mish(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args, PROMOTION.DEFAULT)
    # tanh(log(1 + e)) is n / (n + 2) where n = e (e + 2) and e = exp(x): one function, not three.
    # Above the limit it is exactly 1, and n would overflow.
    limit = {"float64": 40.0, "float16": 5.0}.get(dtype_of(x), 20.0)
    two, most = (relax.const(value, dtype_of(x)) for value in (2.0, limit))
    e = relax.op.exp(relax.op.minimum(x, most))
    n = relax.op.multiply(e, relax.op.add(e, two))
    return relax.op.multiply(x, relax.op.divide(n, relax.op.add(n, two)))


@converts("hardswish.default", "hardsigmoid.default")
def hard(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args, PROMOTION.DEFAULT)

    def constant(value: float) -> relax.Expr:
        return relax.const(value, dtype_of(x))

    gate = relax.op.maximum(relax.op.add(x, constant(3.0)), constant(0.0))
    gate = relax.op.minimum(gate, constant(6.0))
    if base_name(node) == "hardswish":
        gate = relax.op.multiply(x, gate)  # which may be infinite, as in eager
    return relax.op.divide(gate, constant(6.0))


@converts("leaky_relu.default")
def leaky_relu(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args[:1], PROMOTION.DEFAULT)
    slope = relax.const(importer.argument(node, "negative_slope"), dtype_of(x))
    positive = relax.op.greater(x, relax.const(0.0, dtype_of(x)))
    return relax.op.where(positive, x, relax.op.multiply(x, slope))


@converts("elu.default")
def elu(importer: Importer, node: fx.Node) -> relax.Expr:
    (x,) = promoted(importer, node.args[:1], PROMOTION.DEFAULT)
    names = ("alpha", "scale", "input_scale")
    alpha, gain, input_scale = (importer.argument(node, name) for name in names)

    def compute(value: scalar.Scalar) -> scalar.Scalar:
        def number(constant: float) -> scalar.Scalar:
            return tirx.const(constant, str(value.ty.dtype))

        # The exponential of a positive value may be infinite, but that branch is not selected.
        negative = scalar.expm1(value * number(float(input_scale))) * number(float(alpha * gain))
        return tirx.Select(value <= number(0.0), negative, value * number(float(gain)))

    return importer.emit_te(elementwise(compute), x)


@converts("_to_copy.default", "clone.default", "alias.default", "lift_fresh_copy.default")
def cast(importer: Importer, node: fx.Node) -> relax.Expr:
    return importer.tensor(node.args[0], node.meta["val"].dtype)


def _is_float(x: relax.Expr) -> bool:
    return "float" in dtype_of(x)


def _check_divisor(importer: Importer, node: fx.Node) -> int | None:
    """Refuse an integer division that could trap; return the divisor if it is a number. Division by
    zero, for which eager raises an error, and of the least integer by -1, for which eager wraps,
    would crash the process.
    """
    divisor = node.args[1]
    if node.meta["val"].dtype.is_floating_point:
        return None
    if not isinstance(divisor, fx.Node):
        if is_static(divisor) and divisor:
            return int(divisor)
        if bounds(divisor)[0] > 0:
            return None
    else:
        constant = constant_of(importer.program, divisor)
        if constant is not None and bool(((constant != 0) & (constant != -1)).all()):
            return None
    raise UnsupportedOperator([str(node.target)], "its integer divisor may be 0 or -1")
