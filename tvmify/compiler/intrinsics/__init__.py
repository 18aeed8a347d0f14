"""Vectorized functions of floats, for which TVM calls the C library element by element.

Each is a range reduction and a polynomial, which LLVM keeps in vector registers. Results are
accurate to about two units in the last place over the whole range, including denormal numbers; NaN
and infinities are as in PyTorch. A vector with an argument outside the range of the polynomial
(such as a sine of 1e10) is left to the C library. Functions not listed here keep TVM's lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tvm import tirx
from tvm.ir import Call, Expr, Op, register_op_attr
from tvm.tirx.op import register_intrin_lowering

from tvmify.compiler.intrinsics import (
    exponential,
    logarithm,
    power,
    remainder,
    rounding,
    trigonometry,
)
from tvmify.compiler.intrinsics.lanes import Lanes

#: Above TVM's own rules for these functions, which are registered at levels up to 10.
_LEVEL = 99
#: TVM's CallEffectKind of functions without effects.
_PURE = 1

#: Functions that LLVM also has for vectors, but that TVM lowers element by element.
_INSTRUCTIONS = ("tirx.isnan", "tirx.nearbyint")

_FUNCTIONS = (
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
    """Make TVM use these functions for CPU targets; repeated calls do nothing."""
    for name, printed in _OWN.items():
        register_op_attr(name, "TCallEffectKind", _PURE)
        register_op_attr(name, "TScriptPrinterName", printed)
    for name in _INSTRUCTIONS:
        register_op_attr(name, "TVectorizable", True)
    for name, lower in _FUNCTIONS.items():
        own = Op.get(name)
        if own.get_attr("TVectorizable") is None:  # else TVM splits vectors before they get here
            register_op_attr(name, "TVectorizable", True)
        before = own.get_attr("llvm.FLowerIntrinsic") or own.get_attr("default.FLowerIntrinsic")
        kinds = ("float32",) if name in _FOR_FLOAT32 else ("float32", "float64")
        rule = _lowering(lower, before, kinds)
        register_intrin_lowering(own.name, target="llvm", f=rule, level=_LEVEL)


def _lowering(
    lower: Callable[[Lanes], Expr],
    before: Callable[[Call], Expr] | None,
    kinds: tuple[str, ...],
) -> Callable[[Call], Expr]:
    def rule(call: Call) -> Expr:
        dtype = str(call.ty.dtype)
        if dtype.startswith(kinds):
            lanes = Lanes(*call.args)
            return lanes.bound(lower(lanes))
        if dtype.startswith("float16"):  # by float32, which has more digits than needed
            wide = dtype.replace("16", "32", 1)
            lanes = Lanes(*(argument.astype(wide) for argument in call.args))
            return lanes.bound(lower(lanes)).astype(dtype)
        if before is None:
            return call
        return _lane_by_lane(call, before) if "x" in dtype else before(call)

    return rule


def _lane_by_lane(call: Call, before: Callable[[Call], Expr]) -> Expr:
    """Split a vector into elements, since not all of TVM's own rules take vectors."""
    kind, _, lanes = str(call.ty.dtype).partition("x")
    scalars = [
        before(tirx.call_intrin(kind, call.op, *(tirx.Shuffle([a], [i]) for a in call.args)))
        for i in range(int(lanes))
    ]
    return tirx.Shuffle(scalars, list(range(int(lanes))))
