"""Logarithms and the inverse hyperbolic functions.

The argument is split into a power of two and a number 1 + f between 2/3 and 4/3, whose logarithm a
polynomial (Chebyshev's, from 50 digits) gives: in f, or in float64 in ``f / (2 + f)``, which is
smaller (as in FDLIBM's ``log``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.exponential import LN2
from tvmify.compiler.intrinsics.lanes import Lanes

_LN2 = 0.693147180559945309
#: As `LN2`.
_LOG10_OF_2 = {
    24: (0.30102539, 4.60503907e-6),
    53: (0.30102999566383914, 1.42050232272661e-13),
}
#: 1 / ln 2 and 1 / ln 10, in two parts for float64.
_OF_BASE_2 = (1.4426950408889634, 2.0355273740931033e-17)
_OF_BASE_10 = (0.4342944819032518, 1.098319650216765e-17)
#: Coefficients of a polynomial in ``f`` for ``(log(1 + f) - f) / f**2``, in float32.
_OF_F = (
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
#: Coefficients of a polynomial in ``s**2`` for ``(log((1 + s) / (1 - s)) / s - 2) / s**2``, in
#: float64.
_OF_S = (
    0.13609030262858499,
    0.13209708242059462,
    0.15388867805613718,
    0.18181737626302938,
    0.2222222304835159,
    0.28571428567275936,
    0.4000000000000794,
    0.6666666666666666,
)


def split(v: Lanes, x: Expr) -> tuple[Expr, Expr]:
    """Return the exponent of a positive, normal x, in its place among the bits, and ``m - 1``."""
    exponent = exponent_of(v, x)
    return exponent, v.let(v.as_float(v.as_integer(x) - exponent) - v(1.0))


def exponent_of(v: Lanes, x: Expr) -> Expr:
    """Return the exponent of a positive, normal x, in its place among the bits."""
    above = v.as_integer(x) - v.integer(v.bits_of(2 / 3))
    return v.let(above & v.integer(-1 << (v.digits - 1)))


def as_number(v: Lanes, exponent: Expr) -> Expr:
    """Return an exponent in its place among the bits as a float."""
    return v.cast(exponent, v.float) * v(2.0 ** (1 - v.digits))


def logarithm_near_one(v: Lanes, f: Expr) -> Expr:
    """The logarithm of 1 + f for f between -1/3 and 1/3."""
    square = v.let(f * f)
    if v.digits == 24:
        return v.let(v.polynomial(f, *_OF_F) * square + f)
    s = v.let(f / (v(2.0) + f))
    z = v.let(s * s)
    half = v.let(v(0.5) * square)
    return v.let(f - (half - s * (half + z * v.polynomial(z, *_OF_S))))


def positive_finite(v: Lanes, x: Expr) -> Expr:
    """Whether x is above zero and below infinity, in one comparison."""
    before = v.as_integer(x) - v.integer(1)
    return tirx.reinterpret(v.uint, before) < tirx.const(v.bits_of(math.inf) - 1, v.uint)


def _in_base(
    of_two: dict[int, tuple[float, float]], scale: tuple[float, float]
) -> Callable[[Lanes], Expr]:
    """The logarithm in a base: of two, and `scale` of a natural one, each in two parts."""

    def lower(v: Lanes) -> Expr:
        x, (high, low) = v.x, of_two[v.digits]
        denormal = x < v(2.0 ** (1 - v.bias))
        more = v.digits - 1
        bits, f = split(v, v.let(tirx.Select(denormal, x * v(2.0**more), x)))
        exponent = v.let(as_number(v, bits) - tirx.Select(denormal, v(more), v(0.0)))
        near = logarithm_near_one(v, f)
        if scale != (1.0, 0.0):
            near = v.fma(near, v(scale[0]), near * v(scale[1]))
        result = exponent * v(high) + (exponent * v(low) + near if low else near)
        # Zero, negative numbers, infinity and NaN.
        negative = tirx.Select(x < v(0.0), v.nan, x)
        rest = tirx.Select(x == v(0.0), v(0.0) - v.infinity, negative)
        return tirx.Select(positive_finite(v, x), result, rest)

    return lower


def _log1p_finite(v: Lanes, x: Expr) -> Expr:
    """The logarithm of 1 + x for x above -1 and below infinity."""
    one_more = v(1.0) + x
    exponent = exponent_of(v, one_more)
    # (1 + x) / 2**n - 1 from its two summands: what 1 + x has lost to rounding is still in x. The
    # scale is four times too large, to be a normal number where n is 128 (or 1024).
    scale = v.let(v.as_float(v.integer(v.bits_of(4.0)) - exponent))
    f = v.let((x * v(0.25)) * scale + (scale * v(0.25) - v(1.0)))
    high, low = LN2[v.digits]
    n = v.let(as_number(v, exponent))
    return n * v(high) + (n * v(low) + logarithm_near_one(v, f))


def _log1p(v: Lanes) -> Expr:
    return _log1p_of(v, v.x)


def _log1p_of(v: Lanes, x: Expr) -> Expr:
    result = _log1p_finite(v, x)
    # The sign of zeros; -1, smaller numbers, infinity and NaN.
    result = tirx.Select(x == v(0.0), x, result)
    negative = tirx.Select(x < v(-1.0), v.nan, x)
    rest = tirx.Select(x == v(-1.0), v(0.0) - v.infinity, negative)
    return tirx.Select(tirx.all(x > v(-1.0), x < v.infinity), result, rest)


#: From here on 1 is lost beside a square, and the logarithm of twice the argument is the result.
_FAR = {24: 1e9, 53: 1e18}


def _asinh(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    near = v.let(tirx.min(x, v(_FAR[v.digits])))
    more = near + near * near / (v(1.0) + tirx.sqrt(v(1.0) + near * near))
    return v.keep_nan(v.with_sign(_log1p_or_twice(v, x, more)))


def _acosh(v: Lanes) -> Expr:
    less = v.let(tirx.min(v.x, v(_FAR[v.digits])) - v(1.0))
    result = _log1p_or_twice(v, v.x, less + tirx.sqrt(less * (less + v(2.0))))
    return v.keep_nan(tirx.Select(v.x < v(1.0), v.nan, result))


def _log1p_or_twice(v: Lanes, x: Expr, near: Expr) -> Expr:
    far = x > v(_FAR[v.digits])
    result = _log1p_of(v, v.let(tirx.Select(far, x, near)))
    return result + tirx.Select(far, v(_LN2), v(0.0))


def _atanh(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    result = v(0.5) * _log1p_of(v, v.let((x + x) / (v(1.0) - x)))
    return v.keep_nan(v.as_float(v.as_integer(result) | v.sign(v.x)))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {
    "tirx.log": _in_base(LN2, (1.0, 0.0)),
    "prim.log2": _in_base(dict.fromkeys(LN2, (1.0, 0.0)), _OF_BASE_2),
    "tirx.log10": _in_base(_LOG10_OF_2, _OF_BASE_10),
    "tirx.log1p": _log1p,
    "tirx.asinh": _asinh,
    "tirx.acosh": _acosh,
    "tirx.atanh": _atanh,
}
