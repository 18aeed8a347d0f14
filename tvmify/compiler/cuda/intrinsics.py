"""Functions of half types by way of float32, as eager computes them.

CUDA's own functions of half types are less exact than their type, and some are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tvm import tirx
from tvm.ir import Call, Expr, Op
from tvm.tirx.op import register_intrin_lowering

from tvmify.compiler.intrinsics.exponential import EXPM1

#: Above TVM's own rules for these functions, which are registered at levels up to 10.
_LEVEL = 99
_FUNCTIONS = (
    "acos acosh asin asinh atan atan2 atanh cos cosh erf exp exp2 exp10 hypot log log10 log1p pow "
    "rsqrt sigmoid sin sinh sqrt tan tanh"
).split()
_HALF = ("float16", "bfloat16")


@cache
def register() -> None:
    """Make TVM use these functions for GPUs; repeated calls do nothing."""
    for name in _FUNCTIONS:
        own = Op.get(f"tirx.{name}")
        before = own.get_attr("cuda.FLowerIntrinsic") or own.get_attr("default.FLowerIntrinsic")
        if before is not None:  # else it lowers itself to others
            register_intrin_lowering(own.name, target="cuda", f=_in_float32(before), level=_LEVEL)
    register_intrin_lowering(EXPM1, target="cuda", f=_in_float32(_expm1), level=_LEVEL)


def _in_float32(rule: Callable[[Call], Expr]) -> Callable[[Call], Expr]:
    def lower(call: Call) -> Expr:
        dtype = str(call.ty.dtype)
        if not dtype.startswith(_HALF):
            return rule(call)
        wide = dtype.replace("bfloat16", "float32").replace("float16", "float32")
        arguments = [tirx.Cast(wide, argument) for argument in call.args]
        return tirx.Cast(dtype, rule(tirx.call_intrin(wide, call.op, *arguments)))

    return lower


def _expm1(call: Call) -> Expr:
    dtype = str(call.ty.dtype)
    return tirx.call_pure_extern(dtype, "expm1" if dtype == "float64" else "expm1f", *call.args)
