"""Scalar functions in TIR that TVM lacks or computes inexactly, and their lifting to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from tvmify.compiler import sizes
from tvmify.compiler.intrinsics.exponential import EXPM1
from tvmify.compiler.sizes import Size

#: Expressions of TIR; the stubs of TVM do not name their common type.
Scalar = Any


def elementwise(function: Callable[..., Scalar]) -> Callable[..., te.Tensor]:
    """Lift a function of scalars to tensors, which are broadcast against each other."""

    def compute(*tensors: te.Tensor) -> te.Tensor:
        rank = max(len(tensor.shape) for tensor in tensors)
        shapes = [[1] * (rank - len(t.shape)) + sizes.sizes_of(t.shape) for t in tensors]
        shape = [
            next((e for e in extents if not sizes.is_one(e)), 1)
            for extents in zip(*shapes, strict=True)
        ]

        def element(*indices: Scalar) -> Scalar:
            return function(*(broadcast_element(tensor, indices, shape) for tensor in tensors))

        return te.compute(shape, element, name=function.__name__)

    compute.__name__ = function.__name__  # becomes the name of the kernel
    return compute


def broadcast_element(
    tensor: te.Tensor, indices: Sequence[Scalar], shape: Sequence[Size]
) -> Scalar:
    """Return an element of a tensor that is broadcast to a shape."""
    # Only where the axis is stretched: elsewhere an index of 0 would look like broadcasting to
    # FuseOps, which does not fuse that into a convolution.
    skipped = len(indices) - len(tensor.shape)
    at = [
        0 if sizes.is_one(extent) and not sizes.is_one(wide) else index
        for extent, wide, index in zip(
            tensor.shape, shape[skipped:], indices[skipped:], strict=True
        )
    ]
    return tensor(*at)


def _number(value: float, like: Scalar) -> Scalar:
    return tirx.const(value, str(like.ty.dtype))


def fmod(x: Scalar, y: Scalar) -> Scalar:
    """Return the exact remainder of floats with the sign of the dividend."""
    return tirx.call_intrin(x.ty.dtype, "tirx.fmod", x, y)


def expm1(x: Scalar) -> Scalar:
    """Return ``exp(x) - 1`` without the loss of digits near zero."""
    return tirx.call_intrin(x.ty.dtype, EXPM1, x)


def remainder(x: Scalar, y: Scalar) -> Scalar:
    """Return the remainder of floats with the sign of the divisor, as torch computes it."""
    rest = fmod(x, y)
    return tirx.Select(_signs_differ(rest, y), rest + y, rest)


def floor_divide(x: Scalar, y: Scalar) -> Scalar:
    """Return the floored quotient of floats by the exact remainder, as torch computes it.

    The floor of the rounded quotient may be one too large. A zero has the sign of the quotient.
    """
    rest = fmod(x, y)
    quotient = (x - rest) / y
    one, zero = _number(1.0, x), _number(0.0, x)
    floored = tirx.nearbyint(tirx.Select(_signs_differ(rest, y), quotient - one, quotient))
    signed = tirx.Select(floored == zero, _zero_like(x / y), floored)
    return tirx.Select(y == zero, x / y, signed)


def _zero_like(x: Scalar) -> Scalar:
    dtype = str(x.ty.dtype)
    integer = dtype.replace("float", "int")
    return tirx.reinterpret(dtype, tirx.reinterpret(integer, x) & te.min_value(integer))


def _signs_differ(rest: Scalar, divisor: Scalar) -> Scalar:
    zero = _number(0.0, rest)
    return tirx.any(tirx.all(rest < zero, divisor > zero), tirx.all(rest > zero, divisor < zero))


def to_integer(x: Scalar, dtype: str) -> Scalar:
    """Return a float without its fraction, as an integer; one that is out of range as in torch.

    To LLVM, such a cast is undefined, and gives different results in vectors and tails. Torch casts
    to 32 or 64 bits by x86's instruction, which returns the lowest integer for what does not fit,
    and keeps the low bits.
    """
    if str(x.ty.dtype) in ("float16", "bfloat16"):
        x = tirx.Cast("float32", x)
    is_wide = dtype == "int64" or (dtype == "uint8" and str(x.ty.dtype) == "float64")
    wide, bound = ("int64", 2.0**63) if is_wide else ("int32", 2.0**31)
    fits = tirx.all(x >= _number(-bound, x), x < _number(bound, x))
    whole = tirx.Select(fits, tirx.Cast(wide, x), te.min_value(wide))
    return whole if dtype == wide else tirx.Cast(dtype, whole)


def trunc_divide(x: Scalar, y: Scalar) -> Scalar:
    """Return the quotient of floats without its fraction."""
    return tirx.trunc(x / y)


#: By the base name of the ATen operator.
INTRINSICS: dict[str, Callable[[Scalar], Scalar]] = {
    "cosh": tirx.cosh,
    "exp2": tirx.exp2,
    "expm1": expm1,
    "log10": tirx.log10,
    "log1p": tirx.log1p,
    "log2": tirx.log2,
    "round": tirx.nearbyint,
    "sinh": tirx.sinh,
}
