"""Truncate quotients of symbolic sizes, which are never negative, as processors do. TVM rounds
quotients down. For numbers that may be negative this takes a few more instructions in every index,
and nested ones keep LLVM busy for half a minute.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: Larger than any size or index.
_MOST = 1 << 40


@compiler_pass
class PositiveSizes:
    """Replace floored quotients by equal truncated ones, in functions with symbols."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        symbols = _symbols(function)
        if not symbols:
            return function
        analyzer = sym.Analyzer()
        for variable in symbols:
            _bound(analyzer, variable, 1)

        def enter(loop: tirx.For) -> None:
            bounds = analyzer.const_int_bound(loop.min)
            _bound(analyzer, loop.loop_var, max(int(bounds.min_value), -_MOST))

        def truncated(node: tirx.FloorDiv | tirx.FloorMod) -> Expr:
            is_positive = analyzer.const_int_bound(node.b).min_value > 0
            if not is_positive or analyzer.const_int_bound(node.a).min_value < 0:
                return node
            divide = tirx.truncdiv if isinstance(node, tirx.FloorDiv) else tirx.truncmod
            return divide(node.a, node.b)

        tvm_ffi.structural_walk(function.body, [(tirx.For, enter)], order="pre")
        body = tvm_ffi.structural_map(function.body, [((tirx.FloorDiv, tirx.FloorMod), truncated)])
        return function if body.same_as(function.body) else function.with_body(body)


def _symbols(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the symbols among the shapes of arguments and among the arguments."""
    found: dict[tirx.Var, None] = {}
    for parameter in function.params:
        if hasattr(parameter.ty, "shape"):
            for size in parameter.ty.shape:
                found.update(dict.fromkeys(sizes.variables_of(size)))
        elif str(getattr(parameter.ty, "dtype", "")).startswith("int"):
            found[parameter] = None
    return list(found)


def _bound(analyzer: sym.Analyzer, variable: tirx.Var, least: int) -> None:
    dtype = str(variable.ty.dtype)
    most = _MOST if dtype == "int64" else (1 << 31) - 1
    first, count = tirx.const(least, dtype), tirx.const(most - least, dtype)
    analyzer.bind(variable, ir.Range.from_min_extent(first, count))
