"""The exponential of attention: ``2**x`` for x that is never positive, in a dozen instructions.

Softmax subtracts the largest score first, so nothing overflows, and weights below 2**-127 become
zero: this saves half the work of the general function in `tvmify.compiler.intrinsics`. They must be
exactly zero, since masked values may be uninitialized memory.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr

#: Coefficients of 2**x between -1/2 and 1/2, the highest power first. Fitted for this file with the
#: minimax relative error (9e-8) among those with 2**0 = 1, so that 2**-127 becomes exactly zero.
_COEFFICIENTS = (
    1.3264727197e-03,
    9.6715126396e-03,
    5.5507337432e-02,
    2.4022242085e-01,
    6.9314697756e-01,
    1.0,
)
#: Powers of smaller numbers are zero.
_LEAST = -127.0


def exponent_scale(dtype: str) -> float:
    """Return what scores are multiplied by before `weight`: log2(e) where it computes 2**x."""
    return math.log2(math.e) if dtype == "float32" else 1.0


def weight(x: Expr) -> Expr:
    """Return the power of a score less the largest; NaN stays NaN."""
    dtype = str(x.ty.dtype)
    if not dtype.startswith("float32"):
        return tirx.exp(x)

    def number(value: float) -> Expr:
        return tirx.const(value, dtype)

    floor = tirx.Var("whole", dtype)
    least = tirx.Var("least", dtype)
    rest = least - floor
    power: Expr = number(_COEFFICIENTS[0])
    r = tirx.Var("r", dtype)
    for coefficient in _COEFFICIENTS[1:]:
        power = power * r + number(coefficient)
    integer = dtype.replace("float", "int")
    bits = tirx.reinterpret(integer, power)
    # The exponent of the result is added to that of the power, which is between 0.7 and 1.4.
    scaled = bits + (floor.astype(integer) << tirx.const(23, integer))
    result = tirx.reinterpret(dtype, scaled)
    result = tirx.Let(r, rest, result)
    result = tirx.Let(floor, tirx.nearbyint(least), result)
    # In this order the comparison is false for NaN, so that NaN stays NaN.
    return tirx.Let(least, tirx.max(number(_LEAST), x), result)
