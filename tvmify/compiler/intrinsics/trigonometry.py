"""Trigonometric functions, for arguments of any size.

Multiples of pi are taken off in three parts with fused multiply-adds: the first is
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

#: pi in three parts of as many bits as the type has.
_PI = {
    24: (3.1415927410125732, -8.742277657347586e-08, -3.4302490200105e-15),
    53: (3.141592653589793, 1.2246467991473532e-16, -2.9947698097183397e-33),
}
#: Coefficients of a polynomial in ``r**2`` for ``(sin r - r) / r**3``, r up to half of pi.
_SINE = {
    24: (
        -2.406801513643586e-08,
        2.7535934350453317e-06,
        -0.00019841079483740032,
        0.00833333283662796,
        -0.1666666716337204,
    ),
    53: (
        2.731365867494017e-15,
        -7.643963965925357e-13,
        1.6058977114074673e-10,
        -2.505210761393476e-08,
        2.7557319219139183e-06,
        -0.00019841269841254885,
        0.008333333333333316,
        -0.16666666666666666,
    ),
}
_LARGE = 65536.0
#: Quotients of numbers between these neither overflow nor lose the digits of a normal result.
_SAFE = {24: (1e-37, 3e38), 53: (1e-307, 1.5e308)}
#: Coefficients of a polynomial in ``r**2`` for ``(tan r - r) / r**3``, r up to a quarter of pi.
_TANGENT = {
    24: (
        0.004065345041453838,
        0.0008011558093130589,
        0.010208887979388237,
        0.02154892310500145,
        0.05400387942790985,
        0.13333186507225037,
        0.3333333432674408,
    ),
    53: (
        8.503058194385711e-06,
        -1.8397236604839596e-05,
        3.666783983827127e-05,
        -1.1178698604230587e-05,
        5.5705132251992434e-05,
        8.992810538417746e-05,
        0.00024124581146815736,
        0.0005895709473878464,
        0.0014559035141199599,
        0.0035921208933150546,
        0.008863236009826123,
        0.02186948851679944,
        0.05396825396866166,
        0.13333333333332995,
        0.3333333333333333,
    ),
}
#: Coefficients of polynomials in ``x**2`` for ``(atan x - x) / x**3``, x up to 1, and in float64 up
#: to tan(pi / 8).
_ARCTANGENT = {
    24: (
        -0.0023869972210377455,
        0.01350777130573988,
        -0.035871539264917374,
        0.0625016912817955,
        -0.08656880259513855,
        0.11033764481544495,
        -0.1427856832742691,
        0.19999739527702332,
        -0.3333333134651184,
    ),
    53: (
        -0.019175404711104935,
        0.03923044778479309,
        -0.050854078345894844,
        0.05858140904866328,
        -0.06664510525508936,
        0.07692183125376892,
        -0.0909090457530649,
        0.11111111015187018,
        -0.14285714284665682,
        0.19999999999995516,
        -0.3333333333333333,
    ),
}
#: Coefficients of a polynomial in ``x**2`` for ``(asin x - x) / x**3``, x up to a half.
_ARCSINE = {
    24: (
        0.03369084745645523,
        0.017149237915873528,
        0.031100662425160408,
        0.04459940269589424,
        0.07500094175338745,
        0.1666666567325592,
    ),
    53: (
        0.028768144907903043,
        -0.014866643775849389,
        0.017410114994116346,
        0.005454194113981918,
        0.010323565867782073,
        0.011479065131395764,
        0.013971224128411517,
        0.01735239199404366,
        0.02237217297204786,
        0.030381944137809026,
        0.044642857146364394,
        0.07499999999998429,
        0.16666666666666669,
    ),
}


def _less_multiples(v: Lanes, n: Expr, unit: float) -> Expr:
    """``x - n * unit * pi`` for a power of two as unit."""
    r = v.x
    for part in _PI[v.digits]:
        r = v.fma(n, v(-part * unit), r)
    return v.let(r)


def _with_sign_of_zero(v: Lanes, r: Expr) -> Expr:
    # Zeros keep their sign: -0 plus 0 would be 0.
    return v.let(tirx.Select(v.x == v(0.0), v.x, r))


def _sine(v: Lanes, r: Expr) -> Expr:
    """The sine between -pi / 2 and pi / 2."""
    z = v.let(r * r)
    return v.polynomial(z, *_SINE[v.digits]) * (z * r) + r


def _is_large(v: Lanes) -> Expr:
    # Infinity is rare; NaN is not, since the arithmetic handles it.
    return v.magnitude() > v(_LARGE)


def _sin(v: Lanes) -> Expr:
    n, whole = v.whole(v.x * v(1 / math.pi))
    r = _with_sign_of_zero(v, _less_multiples(v, n, 1.0))
    odd = whole << v.integer(v.bits - 1)
    # With the sign of r, which the polynomial loses for -0.
    result = v.with_sign(v.magnitude(_sine(v, r)), r)
    return v.unless(_is_large(v), v.library("sin"), v.as_float(v.as_integer(result) ^ odd))


def _cos(v: Lanes) -> Expr:
    # cos x = -sin(x - (n + 1/2) pi) for even n.
    n, whole = v.whole(v.x * v(1 / math.pi) - v(0.5))
    r = _less_multiples(v, n + v(0.5), 1.0)
    even = (whole + v.integer(1)) << v.integer(v.bits - 1)
    return v.unless(_is_large(v), v.library("cos"), v.as_float(v.as_integer(_sine(v, r)) ^ even))


def _tan(v: Lanes) -> Expr:
    n, whole = v.whole(v.x * v(2 / math.pi))
    r = _with_sign_of_zero(v, _less_multiples(v, n, 0.5))
    z = v.let(r * r)
    p = v.polynomial(z, *_TANGENT[v.digits])
    t = v.let(p * (z * r) + r)
    t = v.with_sign(v.magnitude(t), r)
    odd = (whole & v.integer(1)) != v.integer(0)
    t = v.let(t)
    numerator, denominator = tirx.Select(odd, v(-1.0), t), tirx.Select(odd, t, v(1.0))
    return v.unless(_is_large(v), v.library("tan"), numerator / denominator)


def _arctangent(v: Lanes, x: Expr) -> Expr:
    """The arc tangent between 0 and 1."""
    if v.digits == 24:
        return v.let(_arctangent_near(v, x))
    # atan x = pi / 4 + atan((x - 1) / (x + 1))
    near_one = x > v(math.tan(math.pi / 8))
    t = v.let(tirx.Select(near_one, (x - v(1.0)) / (x + v(1.0)), x))
    return v.let(tirx.Select(near_one, v(math.pi / 4), v(0.0)) + _arctangent_near(v, t))


def _arctangent_near(v: Lanes, x: Expr) -> Expr:
    z = v.let(x * x)
    return v.polynomial(z, *_ARCTANGENT[v.digits]) * (z * x) + x


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
    least, most = map(v.bits_of, _SAFE[v.digits])
    rare = tirx.any(bits < v.integer(least), bits > v.integer(most))
    return v.unless(rare, v.library("atan2"), v.with_sign(t, y))


def _arcsine(v: Lanes, x: Expr, z: Expr) -> Expr:
    """The arc sine between 0 and 1/2, for x and its square."""
    p = v.polynomial(z, *_ARCSINE[v.digits])
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
