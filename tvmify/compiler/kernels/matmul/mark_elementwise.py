"""Marks functions that join products as element-wise for FuseOps."""

from __future__ import annotations

from tvm import tirx

from tvmify.compiler.kernels.matmul import joined
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: FuseOps' number for functions that work element by element.
_PATTERN = 0


@compiler_pass
class MarkElementwise:
    """Let FuseOps see functions as they want to be seen; runs before it.

    AnnotateTIROpPattern finds a pattern of its own for a function whose attribute says 0.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if joined.ELEMENTWISE not in (function.attrs or {}):
            return function
        return function.with_attr("op_pattern", _PATTERN)
