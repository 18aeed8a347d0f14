"""Exponentials and functions derived from them.

Coefficients of exp are from Cephes (Moshier, "Methods and Programs for Mathematical Functions",
1989), those of exp2 and of float64 Chebyshev's, from 60 digits, those of erf a weighted fit
(Lawson's) of ``-log(erfc x) / x``, in float64 as by Shepherd and Laframboise (1981).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.lanes import Lanes

#: TVM has no such function: an operator of our own.
EXPM1 = "tvmify.expm1"

#: ln 2 in two parts, the first short enough for its product with an exponent to be exact. Tables
#: are by the binary digits of the type.
LN2 = {
    24: (0.693359375, -2.12194440e-4),
    53: (0.693147180559663, 2.8235290563031577e-13),
}
#: Coefficients of a polynomial in ``r`` for ``(e**r - 1 - r) / r**2``, r up to half of ln 2.
_EXP = {
    24: (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5),
    53: (
        2.5100472505694996e-08,
        2.7620201591031547e-07,
        2.7557268276905696e-06,
        2.4801521057868204e-05,
        0.00019841269863171557,
        0.0013888888917367081,
        0.008333333333330039,
        0.041666666666623824,
        0.16666666666666669,
        0.5000000000000001,
    ),
}
#: Coefficients of a polynomial in ``r`` for ``(2**r - 1) / r``, r up to a half.
_EXP2 = {
    24: (
        1.5297502613975666e-05,
        0.00015461677685379982,
        0.0013333501992747188,
        0.009618056006729603,
        0.05550410971045494,
        0.24022650718688965,
        0.6931471824645996,
    ),
    53: (
        4.4549794711760616e-10,
        7.072621356539349e-09,
        1.0178062351388103e-07,
        1.3215442410711872e-06,
        1.525273382999124e-05,
        0.0001540353044202707,
        0.0013333558146416842,
        0.009618129107606715,
        0.0555041086648216,
        0.24022650695910097,
        0.6931471805599453,
    ),
}
#: Coefficients of a polynomial in ``x`` for ``-log(erfc(x)) / x - 1``, x up to 3.95, in float32.
_ERF = (
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
#: Coefficients of a polynomial in ``x**2`` for ``erf(x) / x``, x up to 1, in float64.
_ERF_OF_SQUARE = (
    -7.795898827002142e-10,
    1.3720064546777686e-08,
    -1.6208483801871705e-07,
    1.6447424703317362e-06,
    -1.492473690741966e-05,
    0.00012055294904839707,
    -0.0008548325975389692,
    0.0052239776071164225,
    -0.02686617064323777,
    0.11283791670945006,
    -0.37612638903183543,
    1.1283791670955126,
)
#: Coefficients of a polynomial in ``(x - m) / (x + m)`` for ``e**(x * x) * erfc(x)``, x from 1 to
#: 6, in float64; `_MIDDLE` is m.
_ERFCX = (
    -1.587633893127344e-06,
    -2.2328516517555215e-06,
    7.499735050763299e-06,
    1.8596747731144528e-05,
    -3.4175718896856294e-05,
    -0.00012887483134837842,
    0.0002283799633257643,
    0.0008759152875774328,
    -0.0026423659518134547,
    -0.003993701160123029,
    0.03992253907546523,
    -0.12503305237891782,
    0.2517131932174488,
    -0.37173673394897294,
    0.2108063640611436,
)
_MIDDLE = 2.5
#: The smallest exponent that is clamped to, below which the result is zero, and the largest.
_BOUNDS = {24: (-105.0, -104.0, 89.0), 53: (-746.0, -745.14, 710.0)}
#: Up to here neither the exponential nor its inverse leaves the normal numbers.
_MODERATE = {24: 87.0, 53: 708.0}
#: From here on the hyperbolic tangent is 1.
_SATURATED = {24: 10.0, 53: 20.0}


def reduced(v: Lanes, x: Expr) -> tuple[Expr, Expr, Expr]:
    """Return n, r and ``(e**r - 1 - r) / r**2`` with ``x = n ln 2 + r``."""
    n, whole = v.whole(x * v(1.44269504088896341))
    high, low = LN2[v.digits]
    r = v.let(x - n * v(high) - n * v(low))
    return whole, r, v.polynomial(r, *_EXP[v.digits])


def exponential(v: Lanes, x: Expr, *, moderate: bool = False) -> Expr:
    """e**x for any x, or for one that is known to be `moderate`: up to `_MODERATE` either way."""
    lowest, zero_below, highest = _BOUNDS[v.digits]
    x = v.let(x) if moderate else v.clamp(x, lowest, highest)
    whole, r, p = reduced(v, x)
    mantissa = (p * r + v(1.0)) * r + v(1.0)
    if moderate:
        return mantissa * v.power_of_two(whole)
    return v.scaled(_unless_zero(v, x < v(zero_below), mantissa), whole)


def _unless_zero(v: Lanes, is_zero: Expr, factor: Expr) -> Expr:
    """Return 0 where the result is too small for any number, as that of a masked score. The
    processor takes a hundred cycles to round such a product to zero.
    """
    return v.let(tirx.Select(is_zero, v(0.0), factor))


def exponential_less_one(v: Lanes, x: Expr) -> Expr:
    """e**x - 1 for a moderate x: no digits are lost near zero."""
    whole, r, p = reduced(v, v.let(x))
    power = v.let(v.power_of_two(whole))
    return (p * (r * r) + r) * power + (power - v(1.0))


def _exp(v: Lanes) -> Expr:
    return exponential(v, v.x)


def _expm1(v: Lanes) -> Expr:
    # 2**n in two factors, up to infinity. Small numbers, and zeros, are their own results.
    whole, r, p = reduced(v, v.clamp(v.x, -87.0, _BOUNDS[v.digits][2]))
    normal = v.let(tirx.min(whole, v.integer(v.bias)))
    power = v.let(v.power_of_two(normal))
    result = (p * (r * r) + r) * power + (power - v(1.0))
    result = result * v.power_of_two(whole - normal)
    return tirx.Select(v.magnitude() < v(2.0 ** -(v.digits + 9)), v.x, result)


def _exp2(v: Lanes) -> Expr:
    zero_below = -v.bias - v.digits  # -151 in float32
    x = v.clamp(v.x, zero_below - 1.0, v.bias + 2.0)
    n, whole = v.whole(x)
    power = power_of_two_of(v, v.let(x - n))
    return v.scaled(_unless_zero(v, x < v(zero_below), power), whole)


def power_of_two_of(v: Lanes, r: Expr) -> Expr:
    """2**r for r between -0.5 and 0.5."""
    return v.polynomial(r, *_EXP2[v.digits]) * r + v(1.0)


def _sigmoid(v: Lanes) -> Expr:
    # 1 / (1 + m 2**n), above and below times 2**-h with h near n / 2: nothing overflows, and small
    # results keep their digits.
    lowest, zero_below, highest = _BOUNDS[v.digits]
    x = v.clamp(v.x, lowest, highest)
    whole, r, p = reduced(v, v.let(v(0.0) - x))
    mantissa = (p * r + v(1.0)) * r + v(1.0)
    half = v.let(whole >> v.integer(1))
    one = v.let(v.power_of_two(v.integer(0) - half))
    above = _unless_zero(v, x < v(zero_below), one)
    return above / (mantissa * v.power_of_two(whole - half) + one)


def _tanh(v: Lanes) -> Expr:
    x, most = v.let(v.magnitude()), v(_SATURATED[v.digits])
    e = v.let(exponential_less_one(v, tirx.Select(x > most, most, x) * v(2.0)))
    return v.with_sign(e / (e + v(2.0)))


def _sinh(v: Lanes) -> Expr:
    x, most = v.let(v.magnitude()), v(_MODERATE[v.digits])
    e = v.let(exponential_less_one(v, tirx.min(x, most)))
    result = v(0.5) * (e + e / (e + v(1.0)))
    return v.unless(x > most, v.library("sinh"), v.keep_nan(v.with_sign(result)))


def _cosh(v: Lanes) -> Expr:
    x, most = v.let(v.magnitude()), v(_MODERATE[v.digits])
    e = v.let(exponential(v, tirx.min(x, most), moderate=True))
    return v.unless(x > most, v.library("cosh"), v.keep_nan(v(0.5) * e + v(0.5) / e))


def _erf(v: Lanes) -> Expr:
    return _erf_of_float32(v) if v.digits == 24 else _erf_of_float64(v)


def _erf_of_float64(v: Lanes) -> Expr:
    # Below 1 a polynomial; above, 1 - e**-x**2 times another one. From 6 on the result is 1.
    x = v.let(v.magnitude())
    x = v.let(tirx.Select(x > v(6.0), v(6.0), x))
    square = v.let(x * x)
    t = v.let((x - v(_MIDDLE)) / (x + v(_MIDDLE)))
    rest = v.polynomial(t, *_ERFCX) * exponential(v, v(0.0) - square, moderate=True)
    near = v.polynomial(square, *_ERF_OF_SQUARE) * x
    return v.with_sign(tirx.Select(x < v(1.0), near, v(1.0) - rest))


def _erf_of_float32(v: Lanes) -> Expr:
    # 1 - e**-q with q = -log(erfc |x|), from which no digits are lost near zero. From 3.95 on the
    # result is 1. The polynomial, for q / x - 1, weighs errors by what they do to the result.
    x = v.let(v.magnitude())
    x = v.let(tirx.Select(x > v(3.95), v(3.95), x))
    p = v.polynomial(x, *_ERF)
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
