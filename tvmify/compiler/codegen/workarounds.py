"""Rewrites expressions that TVM miscompiles."""

from __future__ import annotations

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Expr

from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class BeforeLoops:
    """Rewrites that must precede flattening and vectorization.

    - Quotients of descending indices, such as ``(7 - i) // 2`` after a flip: flattening turns this
      one into ``i // -2 + 3`` (``IterMapSimplify``), which is wrong for every odd ``i``.
    - Numbers cast from comparisons: functions that bind such a vector to a variable fail to compile
      ("IntImm can only take scalar").
    - Comparisons of such numbers with zero, which TVM's ``where`` makes of each condition: the
      condition itself, since conditions within conditions take its simplifier long.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        rewrites = [
            ((tirx.FloorDiv, tirx.FloorMod), _counting_up),
            (tirx.Cast, _selected),
            (tirx.LT, _condition),
        ]
        body = tvm_ffi.structural_map(function.body, rewrites)
        return function if body.same_as(function.body) else function.with_body(body)


def _counting_up(node: tirx.FloorDiv | tirx.FloorMod) -> Expr:
    """Write ``(c - x) // k`` as a constant minus a quotient of ``x``; likewise for remainders."""
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


def _condition(node: tirx.LT) -> Expr:
    """Write ``0 < Select(c, 1, 0)`` as ``c``."""
    if not isinstance(node.b, tirx.Select):
        return node
    numbers = node.a, node.b.true_value, node.b.false_value
    is_one = all(isinstance(number, tirx.IntImm) for number in numbers) and (
        [int(number) for number in numbers] == [0, 1, 0]
    )
    return node.b.condition if is_one else node
