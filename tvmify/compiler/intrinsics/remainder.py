"""Exact remainders of floats."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.lanes import Lanes


def _fmod(v: Lanes) -> Expr:
    """The remainder of a truncated division, with the sign of the dividend.

    A rounded quotient of few enough digits has the right whole part, or is one too large where the
    exact one was just below. Then ``x - whole * y`` is a multiple of the last place of y, no larger
    than y: one fused operation computes it without rounding, and so does the correction by y.
    """
    x, y = (v.let(v.magnitude(argument)) for argument in v.arguments)
    quotient = v.let(x / y)
    rest = v.let(v.fma(v(0.0) - tirx.trunc(quotient), y, x))
    rest = tirx.Select(rest < v(0.0), rest + y, rest)
    # Also where y is infinite, and zero times it would be NaN.
    rest = tirx.Select(x < y, x, rest)
    rare = quotient >= v(2.0**v.digits)
    return v.unless(rare, tirx.Mod(*v.arguments), v.with_sign(rest))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {"tirx.fmod": _fmod}
