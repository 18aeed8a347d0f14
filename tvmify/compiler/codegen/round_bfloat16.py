"""Rounds values that a program casts to bfloat16; TVM would only round stored ones."""

from __future__ import annotations

import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr
from tvm.tirx import FloatImm

from tvmify.compiler.intrinsics.rounding import ROUND_BFLOAT16
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class RoundBfloat16:
    """Round values that are cast to bfloat16 even if they are never stored. ``BF16ComputeLegalize``
    computes in float32, turns such casts into casts to float32, and leaves rounding to stores; so
    the rounding must be explicit before it runs. Values stored directly in a tensor are rounded
    there; buffers that a function allocates become float32.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        own: list[tirx.Var] = []

        def allocated(statement: tirx.AllocBuffer) -> tirx.AllocBuffer:
            own.append(statement.buffer)
            return statement

        def stored(store: tirx.BufferStore) -> tirx.BufferStore:
            value = store.value
            if not _is_rounding(value) or any(store.buffer.same_as(buffer) for buffer in own):
                return store
            bare = tirx.Cast(str(value.ty.dtype), value.value.args[0])
            return tirx.BufferStore(store.buffer, bare, store.indices)

        tvm_ffi.structural_map(function.body, (tirx.AllocBuffer, allocated))
        rewrites = [
            (tirx.Cast, _rounded),
            (FloatImm, _rounded_constant),
            (tirx.BufferStore, stored),
        ]
        body = tvm_ffi.structural_map(function.body, rewrites)
        return function if body.same_as(function.body) else function.with_body(body)


def _is_rounding(value: Expr) -> bool:
    return (
        isinstance(value, tirx.Cast)
        and str(value.ty.dtype).startswith("bfloat16")
        and isinstance(value.value, Call)
        and value.value.op == tvm.ir.Op.get(ROUND_BFLOAT16)
    )


def _rounded(cast: tirx.Cast) -> Expr:
    dtype, source = str(cast.ty.dtype), str(cast.value.ty.dtype)
    if not dtype.startswith("bfloat16") or source.startswith("bfloat16") or _is_rounding(cast):
        return cast
    wide = dtype.replace("bfloat16", "float32")
    value = cast.value if source == wide else tirx.Cast(wide, cast.value)
    return tirx.Cast(dtype, tirx.call_intrin(wide, ROUND_BFLOAT16, value))


def _rounded_constant(number: FloatImm) -> FloatImm:
    if str(number.ty.dtype) != "bfloat16":
        return number
    return FloatImm("bfloat16", torch.tensor(number.value, dtype=torch.bfloat16).item())
