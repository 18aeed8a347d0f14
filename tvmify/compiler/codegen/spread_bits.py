"""Broadcasts the bits of a bfloat16 instead of the number, which TVM leaves unlowered."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr

from tvmify.compiler.passes.compiler_pass import compiler_pass

_REINTERPRET = tvm.ir.Op.get("tirx.reinterpret")


@compiler_pass
class SpreadBits:
    """Broadcast the bits of a bfloat16 instead of the number. ``BF16StorageLegalize`` stores bits,
    but does not change the broadcast of a number.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        body = tvm_ffi.structural_map(function.body, (tirx.Broadcast, _spread))
        return function if body.same_as(function.body) else function.with_body(body)


def _spread(node: tirx.Broadcast) -> Expr:
    number, dtype = node.value, str(node.ty.dtype)
    if not dtype.startswith("bfloat16"):
        return node
    is_bits = isinstance(number, Call) and number.op == _REINTERPRET
    bits = number.args[0] if is_bits else tirx.reinterpret("uint16", number)
    return tirx.reinterpret(dtype, tirx.Broadcast(bits, node.lanes))
