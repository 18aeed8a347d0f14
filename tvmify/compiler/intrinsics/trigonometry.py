"""Trigonometric functions, for arguments of any size.

Multiples of pi are taken off in three parts of 24 bits with fused multiply-adds: the first is
exact, the second exact where digits cancel, so results keep their digits next to the zeros. From
2**16 on three parts are not enough, and the C library is asked. Coefficients: Chebyshev's, from 50
digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.lanes import Lanes

#: pi in three parts of 24 bits each.
_PI = (3.1415927410125732, -8.742277657347586e-08, -3.4302490200105e-15)
_LARGE = 65536.0
#: Quotients of numbers between these neither overflow nor lose the digits of a normal result.
_BITS_OF_1E_37, _BITS_OF_3E38 = 0x02081CEA, 0x7F61B1E6


def _less_multiples(v: Lanes, n: Expr, unit: float) -> Expr:
    """``x - n * unit * pi`` for a power of two as unit."""
    r = v.fma(n, v(-_PI[0] * unit), v.x)
    r = v.fma(n, v(-_PI[1] * unit), r)
    return v.let(v.fma(n, v(-_PI[2] * unit), r))


def _with_sign_of_zero(v: Lanes, r: Expr) -> Expr:
    # Zeros keep their sign: -0 plus 0 would be 0.
    return v.let(tirx.Select(v.x == v(0.0), v.x, r))


def _sine(v: Lanes, r: Expr) -> Expr:
    """The sine between -pi / 2 and pi / 2."""
    z = v.let(r * r)
    p = v.polynomial(
        z,
        -2.406801513643586e-08,
        2.7535934350453317e-06,
        -0.00019841079483740032,
        0.00833333283662796,
        -0.1666666716337204,
    )
    return p * (z * r) + r


def _is_large(v: Lanes) -> Expr:
    # Infinity is rare; NaN is not, since the arithmetic handles it.
    return v.magnitude() > v(_LARGE)


def _sin(v: Lanes) -> Expr:
    n, whole = v.whole(v.x * v(1 / math.pi))
    r = _with_sign_of_zero(v, _less_multiples(v, n, 1.0))
    odd = whole << v.integer(31)
    # With the sign of r, which the polynomial loses for -0.
    result = v.with_sign(v.magnitude(_sine(v, r)), r)
    return v.unless(_is_large(v), v.library("sin"), v.as_float(v.as_integer(result) ^ odd))


def _cos(v: Lanes) -> Expr:
    # cos x = -sin(x - (n + 1/2) pi) for even n.
    n, whole = v.whole(v.x * v(1 / math.pi) - v(0.5))
    r = _less_multiples(v, n + v(0.5), 1.0)
    even = (whole + v.integer(1)) << v.integer(31)
    return v.unless(_is_large(v), v.library("cos"), v.as_float(v.as_integer(_sine(v, r)) ^ even))


def _tan(v: Lanes) -> Expr:
    n, whole = v.whole(v.x * v(2 / math.pi))
    r = _with_sign_of_zero(v, _less_multiples(v, n, 0.5))
    z = v.let(r * r)
    p = v.polynomial(
        z,
        0.004065345041453838,
        0.0008011558093130589,
        0.010208887979388237,
        0.02154892310500145,
        0.05400387942790985,
        0.13333186507225037,
        0.3333333432674408,
    )
    t = v.let(p * (z * r) + r)
    t = v.with_sign(v.magnitude(t), r)
    odd = (whole & v.integer(1)) != v.integer(0)
    t = v.let(t)
    numerator, denominator = tirx.Select(odd, v(-1.0), t), tirx.Select(odd, t, v(1.0))
    return v.unless(_is_large(v), v.library("tan"), numerator / denominator)


def _arctangent(v: Lanes, x: Expr) -> Expr:
    """The arc tangent between 0 and 1."""
    z = v.let(x * x)
    p = v.polynomial(
        z,
        -0.0023869972210377455,
        0.01350777130573988,
        -0.035871539264917374,
        0.0625016912817955,
        -0.08656880259513855,
        0.11033764481544495,
        -0.1427856832742691,
        0.19999739527702332,
        -0.3333333134651184,
    )
    return v.let(p * (z * x) + x)


def _atan(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    above = x > v(1.0)
    t = _arctangent(v, v.let(tirx.Select(above, v(1.0) / x, x)))
    return v.keep_nan(v.with_sign(tirx.Select(above, v(math.pi / 2) - t, t)))


def _atan2(v: Lanes) -> Expr:
    y, x = v.arguments
    high, low = v.let(v.magnitude(y)), v.let(v.magnitude(x))
    larger, smaller = v.let(tirx.max(high, low)), v.let(tirx.min(high, low))
    t = _arctangent(v, v.let(smaller / larger))
    t = v.let(tirx.Select(high > low, v(math.pi / 2) - t, t))
    t = tirx.Select(x < v(0.0), v(math.pi) - t, t)
    # Two zeros, an infinity or NaN. As integers, where NaN is larger than any number.
    bits = v.let(tirx.max(v.as_integer(high), v.as_integer(low)))
    rare = tirx.any(bits < v.integer(_BITS_OF_1E_37), bits > v.integer(_BITS_OF_3E38))
    return v.unless(rare, v.library("atan2"), v.with_sign(t, y))


def _arcsine(v: Lanes, x: Expr, z: Expr) -> Expr:
    """The arc sine between 0 and 1/2, for x and its square."""
    p = v.polynomial(
        z,
        0.03369084745645523,
        0.017149237915873528,
        0.031100662425160408,
        0.04459940269589424,
        0.07500094175338745,
        0.1666666567325592,
    )
    return v.let(p * (z * x) + x)


def _halved(v: Lanes) -> tuple[Expr, Expr]:
    """Whether the magnitude is above 1/2, and the arc sine of it or of its half angle."""
    x = v.let(v.magnitude())
    above = x > v(0.5)
    z = v.let(tirx.Select(above, v(0.5) - v(0.5) * x, x * x))
    return above, _arcsine(v, v.let(tirx.Select(above, tirx.sqrt(z), x)), z)


def _asin(v: Lanes) -> Expr:
    above, t = _halved(v)
    # Beyond 1 the root, hence the result, is NaN.
    return v.keep_nan(v.with_sign(tirx.Select(above, v(math.pi / 2) - (t + t), t)))


def _acos(v: Lanes) -> Expr:
    above, t = _halved(v)
    signed = v.let(v.with_sign(t))
    far = tirx.Select(v.x < v(0.0), v(math.pi) - (t + t), t + t)
    return v.keep_nan(tirx.Select(above, far, v(math.pi / 2) - signed))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {
    "tirx.sin": _sin,
    "tirx.cos": _cos,
    "tirx.tan": _tan,
    "tirx.asin": _asin,
    "tirx.acos": _acos,
    "tirx.atan": _atan,
    "tirx.atan2": _atan2,
}
