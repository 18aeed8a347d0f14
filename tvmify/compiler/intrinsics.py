"""Vectorised float32 functions; TVM by itself calls the C library once for every element.

Each is a range reduction and a polynomial, which LLVM keeps in vector registers. Results are right
to about two units in the last place over the whole range, denormal numbers included; NaN and
infinities come out as in PyTorch. Other types, and functions not listed here, keep TVM's lowering.

Coefficients: exp, log and tanh from Cephes (Moshier, "Methods and Programs for Mathematical
Functions", 1989); erf from N. Juffa's published single-precision minimax polynomials.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tvm import tirx
from tvm.ir import Call, Expr, Op
from tvm.tirx.op import register_intrin_lowering

#: Above TVM's own rules for these functions, which are registered at levels up to 10.
_LEVEL = 99


@cache
def register() -> None:
    """Make TVM use these functions for CPU targets; repeated calls do nothing."""
    for name, lower in _FUNCTIONS.items():
        own = Op.get(f"tirx.{name}")
        before = own.get_attr("llvm.FLowerIntrinsic") or own.get_attr("default.FLowerIntrinsic")
        rule = _for_float32(lower, before)
        register_intrin_lowering(own.name, target="llvm", f=rule, level=_LEVEL)


def _for_float32(
    lower: Callable[[_Float32], Expr], before: Callable[[Call], Expr] | None
) -> Callable[[Call], Expr]:
    def rule(call: Call) -> Expr:
        dtype = str(call.ty.dtype)
        if dtype.startswith("float32"):
            lanes = _Float32(call.args[0])
            return lanes.bound(lower(lanes))
        if dtype.startswith("float16"):  # by way of float32, which holds more digits than asked for
            lanes = _Float32(call.args[0].astype(dtype.replace("16", "32", 1)))
            return lanes.bound(lower(lanes)).astype(dtype)
        return call if before is None else before(call)

    return rule


class _Float32:
    """Arithmetic on vectors as long as an argument.

    Attributes
    ----------
    x
        The argument.
    """

    def __init__(self, argument: Expr) -> None:
        self.float = str(argument.ty.dtype)
        self.int = self.float.replace("float", "int")
        self._bindings: list[tuple[tirx.Var, Expr]] = []
        self.x = self.let(argument)

    def let(self, value: Expr) -> Expr:
        """Name a value that is used more than once; a tree would compute it each time."""
        variable = tirx.Var(f"t{len(self._bindings)}", str(value.ty.dtype))
        self._bindings.append((variable, value))
        return variable

    def bound(self, result: Expr) -> Expr:
        """Put the named values around the result."""
        for variable, value in reversed(self._bindings):
            result = tirx.Let(variable, value, result)
        return result

    def __call__(self, value: float) -> Expr:
        return tirx.const(value, self.float)

    def integer(self, value: int) -> Expr:
        return tirx.const(value, self.int)

    def as_float(self, bits: Expr) -> Expr:
        return tirx.reinterpret(self.float, bits)

    def as_integer(self, value: Expr) -> Expr:
        return tirx.reinterpret(self.int, value)

    def polynomial(self, x: Expr, *coefficients: float) -> Expr:
        """Evaluate a polynomial by Horner's rule, the highest power first."""
        result = self(coefficients[0])
        for coefficient in coefficients[1:]:
            result = result * x + self(coefficient)
        return result

    def clamp(self, x: Expr, low: float, high: float) -> Expr:
        return self.let(tirx.max(tirx.min(x, self(high)), self(low)))

    def magnitude(self) -> Expr:
        """Return the magnitude of x."""
        return self.as_float(self.as_integer(self.x) & self.integer(0x7FFFFFFF))

    def with_sign(self, result: Expr) -> Expr:
        """Give a result that is not negative the sign of x."""
        sign = self.as_integer(self.x) & self.integer(-0x80000000)
        return self.as_float(self.as_integer(result) | sign)

    def keep_nan(self, result: Expr) -> Expr:
        return tirx.Select(self.x == self.x, result, self.x)


def _exponential(v: _Float32, x: Expr, *, moderate: bool = False) -> Expr:
    """e**x for any x but NaN, or for x between -87 and 88 if it is known to be `moderate`."""
    # Beyond these bounds the result is infinite, or zero even among the denormal numbers.
    x = v.let(x) if moderate else v.clamp(x, -104.0, 89.0)
    n = v.let(tirx.floor(x * v(1.44269504088896341) + v(0.5)))
    # ln 2 in two parts, the first short enough for n * part to be exact.
    r = v.let(x - n * v(0.693359375) - n * v(-2.12194440e-4))
    p = v.polynomial(
        r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5
    )
    mantissa = p * (r * r) + r + v(1.0)
    whole = v.let(n.astype(v.int))
    if moderate:
        return mantissa * _power_of_two(v, whole)
    # 2**n in two factors: one alone could not stand for the exponents of infinity and denormals.
    half = v.let(whole >> v.integer(1))
    return mantissa * _power_of_two(v, half) * _power_of_two(v, whole - half)


def _power_of_two(v: _Float32, exponent: Expr) -> Expr:
    return v.as_float((exponent + v.integer(127)) << v.integer(23))


def _exp(v: _Float32) -> Expr:
    return v.keep_nan(_exponential(v, v.x))


def _sigmoid(v: _Float32) -> Expr:
    # With e**-|x| nothing overflows, and small results keep their digits.
    e = v.let(_exponential(v, v(0.0) - v.magnitude()))
    return v.keep_nan(tirx.Select(v.x < v(0.0), e, v(1.0)) / (v(1.0) + e))


def _log(v: _Float32) -> Expr:
    x = v.x
    denormal = x < v(1.17549435e-38)
    bits = v.let(v.as_integer(tirx.Select(denormal, x * v(8388608.0), x)))
    exponent = ((bits >> v.integer(23)) & v.integer(255)) - v.integer(126)
    m = v.let(v.as_float((bits & v.integer(0x7FFFFF)) | v.integer(0x3F000000)))
    small = m < v(0.707106781186547524)
    e = v.let(
        exponent.astype(v.float)
        - tirx.Select(small, v(1.0), v(0.0))
        - tirx.Select(denormal, v(23.0), v(0.0))
    )
    m = v.let(tirx.Select(small, m + m, m) - v(1.0))
    z = v.let(m * m)
    p = v.polynomial(
        m,
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
    y = p * m * z + e * v(-2.12194440e-4) - v(0.5) * z
    result = m + y + e * v(0.693359375)
    infinity = v.let(v.as_float(v.integer(0x7F800000)))
    result = tirx.Select(x == infinity, infinity, result)
    result = tirx.Select(x == v(0.0), v(0.0) - infinity, result)
    nan = v.as_float(v.integer(0x7FC00000))
    return v.keep_nan(tirx.Select(x < v(0.0), nan, result))


def _tanh(v: _Float32) -> Expr:
    x = v.let(v.magnitude())
    z = v.let(x * x)
    p = v.polynomial(
        z,
        -5.70498872745e-3,
        2.06390887954e-2,
        -5.37397155531e-2,
        1.33314422036e-1,
        -3.33332819422e-1,
    )
    near_zero = p * z * x + x
    # From 10 on the result is 1.
    twice = tirx.min(x, v(10.0)) * v(2.0)
    far = v(1.0) - v(2.0) / (_exponential(v, twice, moderate=True) + v(1.0))
    return v.keep_nan(v.with_sign(tirx.Select(x < v(0.625), near_zero, far)))


def _erf(v: _Float32) -> Expr:
    z = v.let(v.x * v.x)
    p = v.polynomial(
        z,
        -5.96761703e-4,
        4.99119423e-3,
        -2.67681349e-2,
        1.12819925e-1,
        -3.76125336e-1,
        1.28379166e-1,
    )
    near_zero = p * v.x + v.x
    # 1 - e**q(|x|); from 4 on it is 1.
    magnitude = v.let(tirx.min(v.magnitude(), v(4.0)))
    q = v.polynomial(
        magnitude,
        -1.72853470e-5,
        3.83197126e-4,
        -3.88396438e-3,
        2.42546219e-2,
        -1.06777877e-1,
        -6.34846687e-1,
        -1.28717512e-1,
    )
    far = v.with_sign(v(1.0) - _exponential(v, q * magnitude - magnitude, moderate=True))
    return v.keep_nan(tirx.Select(magnitude < v(0.927734375), near_zero, far))


def _rsqrt(v: _Float32) -> Expr:
    return v(1.0) / tirx.sqrt(v.x)


_FUNCTIONS: dict[str, Callable[[_Float32], Expr]] = {
    "exp": _exp,
    "log": _log,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "erf": _erf,
    "rsqrt": _rsqrt,
}
