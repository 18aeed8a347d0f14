"""Exponentials and functions derived from them.

Coefficients of exp are from Cephes (Moshier, "Methods and Programs for Mathematical Functions",
1989), those of exp2 Chebyshev's, those of erf a weighted fit (Lawson's) of ``-log(erfc x) / x``.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.lanes import Lanes

#: TVM has no such function: an operator of our own.
EXPM1 = "tvmify.expm1"


def reduced(v: Lanes, x: Expr) -> tuple[Expr, Expr, Expr]:
    """Return n, r and ``(e**r - 1 - r) / r**2`` with ``x = n ln 2 + r``."""
    n, whole = v.whole(x * v(1.44269504088896341))
    # ln 2 in two parts, the first short enough for n * part to be exact.
    r = v.let(x - n * v(0.693359375) - n * v(-2.12194440e-4))
    p = v.polynomial(
        r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5
    )
    return whole, r, p


def exponential(v: Lanes, x: Expr, *, moderate: bool = False) -> Expr:
    """e**x for any x, or for x between -87 and 88 if it is known to be `moderate`."""
    # Beyond these bounds the result is infinite, or zero even among the denormal numbers.
    x = v.let(x) if moderate else v.clamp(x, -105.0, 89.0)
    whole, r, p = reduced(v, x)
    mantissa = (p * r + v(1.0)) * r + v(1.0)
    if moderate:
        return mantissa * v.power_of_two(whole)
    return v.scaled(_unless_zero(v, x < v(-104.0), mantissa), whole)


def _unless_zero(v: Lanes, is_zero: Expr, factor: Expr) -> Expr:
    """Return 0 where the result is too small for any number, as that of a masked score. The
    processor takes a hundred cycles to round such a product to zero.
    """
    return v.let(tirx.Select(is_zero, v(0.0), factor))


def exponential_less_one(v: Lanes, x: Expr) -> Expr:
    """e**x - 1 for x between -87 and 88: no digits are lost near zero."""
    whole, r, p = reduced(v, v.let(x))
    power = v.let(v.power_of_two(whole))
    return (p * (r * r) + r) * power + (power - v(1.0))


def _exp(v: Lanes) -> Expr:
    return exponential(v, v.x)


def _expm1(v: Lanes) -> Expr:
    # 2**n in two factors, up to infinity. Small numbers, and zeros, are their own results.
    whole, r, p = reduced(v, v.clamp(v.x, -87.0, 89.0))
    normal = v.let(tirx.min(whole, v.integer(127)))
    power = v.let(v.power_of_two(normal))
    result = (p * (r * r) + r) * power + (power - v(1.0))
    result = result * v.power_of_two(whole - normal)
    return tirx.Select(v.magnitude() < v(1.0e-10), v.x, result)


def _exp2(v: Lanes) -> Expr:
    x = v.clamp(v.x, -152.0, 129.0)
    n, whole = v.whole(x)
    power = power_of_two_of(v, v.let(x - n))
    return v.scaled(_unless_zero(v, x < v(-151.0), power), whole)


def power_of_two_of(v: Lanes, r: Expr) -> Expr:
    """2**r for r between -0.5 and 0.5."""
    p = v.polynomial(
        r,
        1.5297502613975666e-05,
        0.00015461677685379982,
        0.0013333501992747188,
        0.009618056006729603,
        0.05550410971045494,
        0.24022650718688965,
        0.6931471824645996,
    )
    return p * r + v(1.0)


def _sigmoid(v: Lanes) -> Expr:
    # 1 / (1 + m 2**n), above and below times 2**-h with h near n / 2: nothing overflows, and small
    # results keep their digits.
    x = v.clamp(v.x, -105.0, 89.0)
    whole, r, p = reduced(v, v.let(v(0.0) - x))
    mantissa = (p * r + v(1.0)) * r + v(1.0)
    half = v.let(whole >> v.integer(1))
    one = v.let(v.power_of_two(v.integer(0) - half))
    above = _unless_zero(v, x < v(-104.0), one)
    return above / (mantissa * v.power_of_two(whole - half) + one)


def _tanh(v: Lanes) -> Expr:
    # From 10 on the result is 1.
    x = v.let(v.magnitude())
    e = v.let(exponential_less_one(v, tirx.Select(x > v(10.0), v(10.0), x) * v(2.0)))
    return v.with_sign(e / (e + v(2.0)))


def _sinh(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    e = v.let(exponential_less_one(v, tirx.min(x, v(87.0))))
    result = v(0.5) * (e + e / (e + v(1.0)))
    return v.unless(x > v(87.0), v.library("sinh"), v.keep_nan(v.with_sign(result)))


def _cosh(v: Lanes) -> Expr:
    x = v.let(v.magnitude())
    e = v.let(exponential(v, tirx.min(x, v(87.0)), moderate=True))
    return v.unless(x > v(87.0), v.library("cosh"), v.keep_nan(v(0.5) * e + v(0.5) / e))


def _erf(v: Lanes) -> Expr:
    # 1 - e**-q with q = -log(erfc |x|), from which no digits are lost near zero. From 3.95 on the
    # result is 1. The polynomial, for q / x - 1, weighs errors by what they do to the result.
    x = v.let(v.magnitude())
    x = v.let(tirx.Select(x > v(3.95), v(3.95), x))
    p = v.polynomial(
        x,
        -9.256279554392677e-06,
        0.00011764139344450086,
        -0.0006328372401185334,
        0.0016670281765982509,
        -0.00016039671027101576,
        -0.019153064116835594,
        0.10277783125638962,
        0.6366193890571594,
        0.1283791661262512,
    )
    result = exponential_less_one(v, v(0.0) - (p * x + x))
    return v.with_sign(v.magnitude(result))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {
    "tirx.exp": _exp,
    "tirx.exp2": _exp2,
    EXPM1: _expm1,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.sinh": _sinh,
    "tirx.cosh": _cosh,
    "tirx.erf": _erf,
}
