"""Powers: reciprocal square roots, and general powers."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.exponential import power_of_two_of
from tvmify.compiler.intrinsics.lanes import Lanes
from tvmify.compiler.intrinsics.logarithm import as_number, split


def _rsqrt(v: Lanes) -> Expr:
    return v(1.0) / tirx.sqrt(v.x)


def _logarithm(v: Lanes, x: Expr) -> Expr:
    """The logarithm of a positive x in base two, in double precision to 33 bits.

    The exponent of a power multiplies the error of the logarithm, by up to 2**7.
    """
    denormal = x < v(1.17549435e-38)
    bits, f = split(v, v.let(tirx.Select(denormal, x * v(8388608.0), x)))
    n = as_number(v, bits) - tirx.Select(denormal, v(23.0), v(0.0))
    wide = v.let(v.cast(f, v.double))
    p = v.polynomial(
        wide,
        0.15377125307658862,
        -0.16599428813932715,
        0.124816639367347,
        -0.1374949345626878,
        0.1607349572696111,
        -0.18080231601297725,
        0.20608494395275082,
        -0.24043384189982597,
        0.2885392092154406,
        -0.36067397503253135,
        0.4808983461624031,
        -0.7213475195890743,
        1.4426950408889634,
    )
    return p * wide + v.cast(n, v.double)


def _pow(v: Lanes) -> Expr:
    x, y = v.arguments
    base = v.let(v.magnitude(x))
    wide = v.let(v.cast(y, v.double) * _logarithm(v, base))
    # Beyond these bounds the result is infinite, or zero even among the denormal numbers.
    limit = tirx.const(151.0, v.double), tirx.const(129.0, v.double)
    wide = v.let(tirx.max(tirx.min(wide, limit[1]), tirx.const(0.0, v.double) - limit[0]))
    n, whole = v.whole(v.cast(wide, v.float))
    r = v.let(v.cast(wide - v.cast(n, v.double), v.float))
    result = v.let(v.scaled(power_of_two_of(v, r), whole))
    # A negative base: positive, negative or NaN by whether the exponent is even, odd or neither.
    # From 2**24 on every float is even, and so is its half as a float.
    half = y * v(0.5)
    odd = tirx.all(tirx.floor(y) == y, tirx.floor(half) != half)
    negative = tirx.Select(odd, v.with_sign(result, v(-1.0)), result)
    negative = tirx.Select(tirx.floor(y) == y, negative, v.nan)
    result = tirx.Select(x < v(0.0), negative, result)
    # Zeros, infinities and NaN have special rules, which the C library knows. Not a negation of
    # comparisons of floats: TVM takes ``not (a < b)`` for ``a >= b``.
    infinite = v.integer(v.bits_of(math.inf))
    rare = tirx.any(
        v.as_integer(base) == v.integer(0),
        v.as_integer(base) >= infinite,
        v.as_integer(v.magnitude(y)) >= infinite,
    )
    # Also for a base that is NaN, where the C library returns 1 for some NaN only.
    return tirx.Select(y == v(0.0), v(1.0), v.unless(rare, v.library("pow"), result))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {"tirx.rsqrt": _rsqrt, "tirx.pow": _pow}
