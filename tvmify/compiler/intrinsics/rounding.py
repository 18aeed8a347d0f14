"""Rounding to fewer digits, in place."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler.intrinsics.lanes import Lanes

#: TVM has no such function: an operator of our own. The result is a float32.
ROUND_BFLOAT16 = "tvmify.round_bfloat16"


def _round_bfloat16(v: Lanes) -> Expr:
    # To the nearest, ties to even; a carry into the exponent is right, up to infinity.
    bits = v.let(v.as_integer(v.x))
    last = (bits >> v.integer(16)) & v.integer(1)
    rounded = (bits + v.integer(0x7FFF) + last) & v.integer(-0x10000)
    return tirx.Select(tirx.isnan(v.x), v.x, v.as_float(rounded))


FUNCTIONS: dict[str, Callable[[Lanes], Expr]] = {ROUND_BFLOAT16: _round_bfloat16}
