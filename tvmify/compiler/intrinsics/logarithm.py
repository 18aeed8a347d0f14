"""Logarithms and the inverse hyperbolic functions.

The argument is split into a power of two and a number between 2/3 and 4/3, whose logarithm a
polynomial (Chebyshev's, from 50 digits) gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.lanes import Lanes

_LN2 = 0.693147180559945309


def split(v: Lanes, x: Expr) -> tuple[Expr, Expr]:
    """Return the exponent of a positive, normal x, as a multiple of 2**23, and ``m - 1``."""
    bits = v.as_integer(x)
    exponent = v.let((bits - v.integer(0x3F2AAAAB)) & v.integer(-0x800000))
    return exponent, v.let(v.as_float(bits - exponent) - v(1.0))


def logarithm_near_one(v: Lanes, f: Expr) -> Expr:
    """The logarithm of 1 + f for f between -1/3 and 1/3."""
    square = v.let(f * f)
    p = v.polynomial(
        f,
        0.11330617219209671,
        -0.12422200292348862,
        0.1091565489768982,
        -0.12288721650838852,
        0.1429186761379242,
        -0.16673316061496735,
        0.19999948143959045,
        -0.24999944865703583,
        0.3333333432674408,
        -0.5,
    )
    return v.let(p * square + f)


def positive_finite(v: Lanes, x: Expr) -> Expr:
    """Whether x is above zero and below infinity, in one comparison."""
    before = v.as_integer(x) - v.integer(1)
    return tirx.reinterpret(v.uint, before) < tirx.const(0x7F7FFFFF, v.uint)


def _in_base(high: float, low: float, scale: float) -> Callable[[Lanes], Expr]:
    """The logarithm in a base: `scale` of one of the natural ones, `high` + `low` of two."""

    def lower(v: Lanes) -> Expr:
        x = v.x
        denormal = x < v(1.17549435e-38)
        bits, f = split(v, v.let(tirx.Select(denormal, x * v(8388608.0), x)))
        exponent = v.let(
            v.cast(bits, v.float) * v(2.0**-23) - tirx.Select(denormal, v(23.0), v(0.0))
        )
        near = logarithm_near_one(v, f)
        if scale != 1.0:
            near = near * v(scale)
        result = exponent * v(high) + (exponent * v(low) + near if low else near)
        # Zero, negative numbers, infinity and NaN.
        negative = tirx.Select(x < v(0.0), v.as_float(v.integer(0x7FC00000)), x)
        zero = v.as_float(v.integer(-0x800000))
        rest = tirx.Select(x == v(0.0), zero, negative)
        return tirx.Select(positive_finite(v, x), result, rest)

    return lower


def _log1p_finite(v: Lanes, x: Expr) -> Expr:
    """The logarithm of 1 + x for x above -1 and below infinity."""
    one_more = v(1.0) + x
    exponent = v.let((v.as_integer(one_more) - v.integer(0x3F2AAAAB)) & v.integer(-0x800000))
    # (1 + x) / 2**n - 1 from its two summands: what 1 + x has lost to rounding is still in x. The
    # scale is four times too large, to be a normal number where n is 128.
    scale = v.let(v.as_float(v.integer(0x40800000) - exponent))
    f = v.let((x * v(0.25)) * scale + (scale * v(0.25) - v(1.0)))
    n = v.cast(exponent, v.float) * v(2.0**-23)
    return n * v(_LN2) + logarithm_near_one(v, f)


def _log1p(v: Lanes) -> Expr:
    return _log1p_of(v, v.x)


def _log1p_of(v: Lanes, x: Expr) -> Expr:
    infinity = v.as_float(v.integer(0x7F800000))
    result = _log1p_finite(v, x)
    # The sign of zeros; -1, smaller numbers, infinity and NaN.
    result = tirx.Select(x == v(0.0), x, result)
    negative = tirx.Select(x < v(-1.0), v.as_float(v.integer(0x7FC00000)), x)
    rest = tirx.Select(x == v(-1.0), v(0.0) - infinity, negative)
    return tirx.Select(tirx.all(x > v(-1.0), x < infinity), result, rest)


#: From here on 1 is lost beside a square, and the logarithm of twice the argument is the result.
_FAR = 1.0e9


def _asinh(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    near = v.let(tirx.min(x, v(_FAR)))
    more = near + near * near / (v(1.0) + tirx.sqrt(v(1.0) + near * near))
    return v.keep_nan(v.with_sign(_log1p_or_twice(v, x, more)))


def _acosh(v: Lanes) -> Expr:
    less = v.let(tirx.min(v.x, v(_FAR)) - v(1.0))
    result = _log1p_or_twice(v, v.x, less + tirx.sqrt(less * (less + v(2.0))))
    nan = v.as_float(v.integer(0x7FC00000))
    return v.keep_nan(tirx.Select(v.x < v(1.0), nan, result))


def _log1p_or_twice(v: Lanes, x: Expr, near: Expr) -> Expr:
    far = x > v(_FAR)
    result = _log1p_of(v, v.let(tirx.Select(far, x, near)))
    return result + tirx.Select(far, v(_LN2), v(0.0))


def _atanh(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    result = v(0.5) * _log1p_of(v, v.let((x + x) / (v(1.0) - x)))
    return v.keep_nan(v.as_float(v.as_integer(result) | v.sign(v.x)))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {
    "tirx.log": _in_base(0.693359375, -2.12194440e-4, 1.0),
    "prim.log2": _in_base(1.0, 0.0, 1 / math.log(2)),
    "tirx.log10": _in_base(0.30102539, 4.60503907e-6, 1 / math.log(10)),
    "tirx.log1p": _log1p,
    "tirx.asinh": _asinh,
    "tirx.acosh": _acosh,
    "tirx.atanh": _atanh,
}
