"""Marks functions that join products as element-wise for FuseOps."""

from __future__ import annotations

from tvm import tirx

from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.matmul import joined
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class MarkElementwise:
    """Set the fusion pattern of functions as their attribute says; runs before FuseOps.

    AnnotateTIROpPattern overwrites a pattern of 0.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if joined.ELEMENTWISE not in (function.attrs or {}):
            return function
        return function.with_attr(Pattern.ELEMENTWISE.attributes)
