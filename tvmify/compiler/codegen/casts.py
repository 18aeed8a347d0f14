"""Explicit casts, with the results that they have in eager."""

from __future__ import annotations

from tvm import relax
from tvm.ir import Expr

from tvmify.compiler.kernels.elementwise.scalar import elementwise, to_integer

_INTEGERS = frozenset("int8 int16 int32 int64 uint8".split())


def legalize_astype(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower ``relax.astype``: floats to integers as torch does, all others as TVM does."""
    source, dtype = str(call.args[0].ty.dtype), str(call.ty.dtype)
    if "float" not in source or dtype not in _INTEGERS:
        return call.op.get_attr("FLegalize")(builder, call)

    def cast(x: Expr) -> Expr:
        return to_integer(x, dtype)

    return builder.call_te(elementwise(cast), call.args[0], primfunc_name_hint="cast")
