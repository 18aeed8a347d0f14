"""Expressions that TVM gets wrong, in a form that it gets right."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, Expr

_REINTERPRET = tvm.ir.Op.get("tirx.reinterpret")


@tirx.transform.prim_func_pass(opt_level=0, name="BeforeLoops")
class BeforeLoops:
    """What has to be rewritten before buffers are flat, and loops vectors.

    - Quotients of what counts down, as ``(7 - i) // 2`` after a flip: flattening makes ``i // -2 +
      3`` of it (``IterMapSimplify``), which is another element for every odd ``i``.
    - Numbers cast from comparisons: a function of such a vector, whose argument gets a name, has no
      instructions ("IntImm can only take scalar").
    """

    def transform_function(
        self, function: tirx.PrimFunc, _: tvm.IRModule, __: object
    ) -> tirx.PrimFunc:
        """Rewrite one function."""
        rewrites = [((tirx.FloorDiv, tirx.FloorMod), _counting_up), (tirx.Cast, _selected)]
        body = tvm_ffi.structural_map(function.body, rewrites)
        return function if body.same_as(function.body) else function.with_body(body)


@tirx.transform.prim_func_pass(opt_level=0, name="SpreadBits")
class SpreadBits:
    """Spread the bits of a bfloat16 over a vector, not the number.

    ``BF16StorageLegalize`` stores bits, and leaves the vector of one number as it is.
    """

    def transform_function(
        self, function: tirx.PrimFunc, _: tvm.IRModule, __: object
    ) -> tirx.PrimFunc:
        """Rewrite one function."""
        body = tvm_ffi.structural_map(function.body, (tirx.Broadcast, _spread))
        return function if body.same_as(function.body) else function.with_body(body)


def _counting_up(node: tirx.FloorDiv | tirx.FloorMod) -> Expr:
    """Write ``(c - x) // k`` as a constant less a quotient of ``x``, and so the remainder."""
    if not isinstance(node.b, tirx.IntImm) or int(node.b) < 1:
        return node
    counted = sym.Analyzer().simplify(node.a)
    if not isinstance(counted, tirx.Sub) or not isinstance(counted.a, tirx.IntImm):
        return node
    most, by, dtype = int(counted.a), int(node.b), str(node.ty.dtype)
    up = counted.b + tirx.const(by - 1 - most % by, dtype)
    if isinstance(node, tirx.FloorDiv):
        return tirx.const(most // by, dtype) - tirx.floordiv(up, node.b)
    return tirx.const(by - 1, dtype) - tirx.floormod(up, node.b)


def _selected(node: tirx.Cast) -> Expr:
    dtype = str(node.ty.dtype)
    if str(node.value.ty.dtype) != "bool" or dtype == "bool":
        return node
    return tirx.Select(node.value, tirx.const(1, dtype), tirx.const(0, dtype))


def _spread(node: tirx.Broadcast) -> Expr:
    number, dtype = node.value, str(node.ty.dtype)
    if not dtype.startswith("bfloat16") or not isinstance(number, Call):
        return node
    if number.op != _REINTERPRET:
        return node
    return tirx.reinterpret(dtype, tirx.Broadcast(number.args[0], node.lanes))
