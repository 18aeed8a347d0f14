"""Explicit casts, with the results that they have in eager."""

from __future__ import annotations

import torch
from tvm import relax
from tvm.ir import Expr
from tvm.ir.expr import GenericConst

from tvmify.compiler.kernels.elementwise.scalar import elementwise, to_integer
from tvmify.torch_compat.dtypes import wrapped

_INTEGERS = frozenset("int8 int16 int32 int64 uint8".split())


def legalize_astype(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower ``relax.astype``: floats to integers as torch does, all others as TVM does."""
    x, dtype = call.args[0], str(call.ty.dtype)
    source = str(x.ty.dtype)
    if "float" not in source or dtype not in _INTEGERS:
        if isinstance(x, GenericConst) and not x.ty.ndim and dtype in _INTEGERS:
            # For a number that does not fit, TVM raises an error.
            return relax.const(wrapped(x.value.numpy().item(), getattr(torch, dtype)), dtype)
        return call.op.get_attr("FLegalize")(builder, call)

    def cast(x: Expr) -> Expr:
        return to_integer(x, dtype)

    return builder.call_te(elementwise(cast), x, primfunc_name_hint="cast")
