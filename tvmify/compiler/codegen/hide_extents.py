"""Keep how far loops go from ``LowerIntrin``. It analyses every variable that depends on a loop,
but only needs to know that none is negative. With symbolic sizes, an extent is a variable for a
long expression, and the analysis took a fifth of a second for each matrix product.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class HideExtents:
    """Reinterpret each extent that is a variable as its own type, for which LLVM emits nothing."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        body = tvm_ffi.structural_map(function.body, [(tirx.For, _hidden)])
        return function if body.same_as(function.body) else function.with_body(body)


def _hidden(loop: tirx.For) -> tirx.For:
    if not isinstance(loop.extent, tirx.Var):
        return loop
    # `tirx.reinterpret` would return an expression of that type unchanged.
    extent = tirx.call_intrin(str(loop.extent.ty.dtype), "tirx.reinterpret", loop.extent)
    return tirx.For(
        loop.loop_var,
        loop.min,
        extent,
        loop.kind,
        loop.body,
        loop.thread_binding,
        loop.annotations,
        loop.step,
    )
