"""Vectorized functions of floats, for which TVM calls the C library element by element.

Each is a range reduction and a polynomial, which LLVM keeps in vector registers. Results are
accurate to about two units in the last place over the whole range, including denormal numbers; NaN
and infinities are as in PyTorch. A vector with an argument outside the range of the polynomial
(such as a sine of 1e10) is left to the C library. Functions not listed here keep TVM's lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tvm.ir import Expr, Op, register_op_attr

from tvmify.compiler.intrinsics import (
    exponential,
    logarithm,
    power,
    remainder,
    rounding,
    trigonometry,
)
from tvmify.compiler.intrinsics.lanes import Lanes

#: TVM's CallEffectKind of functions without effects.
_PURE = 1

#: Functions that LLVM also has for vectors, but that TVM lowers element by element.
_INSTRUCTIONS = ("tirx.isnan", "tirx.nearbyint")

FUNCTIONS = (
    exponential.FUNCTIONS
    | logarithm.FUNCTIONS
    | power.FUNCTIONS
    | remainder.FUNCTIONS
    | rounding.FUNCTIONS
    | trigonometry.FUNCTIONS
)
#: Our own operators, and their names in printed programs.
_OWN = {exponential.EXPM1: "expm1", rounding.ROUND_BFLOAT16: "round_bfloat16"}

#: Of float32 alone: in float64, the logarithm of a power needs more digits than the type has.
_FOR_FLOAT32 = frozenset({"tirx.pow", rounding.ROUND_BFLOAT16})


@cache
def register() -> None:
    """Let TVM vectorize calls of these functions; repeated calls do nothing."""
    for name, printed in _OWN.items():
        register_op_attr(name, "TCallEffectKind", _PURE)
        register_op_attr(name, "TScriptPrinterName", printed)
    for name in (*_INSTRUCTIONS, *FUNCTIONS):
        if Op.get(name).get_attr("TVectorizable") is None:  # else TVM would split vectors
            register_op_attr(name, "TVectorizable", True)


def has(name: str, dtype: str) -> bool:
    """Whether an operator of TVM is one of these functions for a dtype."""
    kinds = ("float32",) if name in _FOR_FLOAT32 else ("float32", "float64")
    return name in FUNCTIONS and dtype.startswith(kinds)


def lowered(name: str, arguments: Sequence[Expr]) -> Expr:
    """Return what computes a function of scalars or vectors, for the target whose scope is open."""
    lanes = Lanes(*arguments)
    return lanes.bound(FUNCTIONS[name](lanes))
