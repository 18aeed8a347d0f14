"""Allocate the sums of a kernel on the stack, from where LLVM moves them to registers. TVM
allocates every buffer above 1 KB, such as a tile of sums, from the workspace. LLVM keeps such
memory in registers only while nothing in the loop may write elsewhere, which excludes prefetches,
and stores and loads it around each loop. For the stack it has no such limits.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import rewrite_body
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class SumsOnStack:
    """Make TVM leave allocations of scope ``local`` alone; runs before LowerTVMBuiltin."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(stmt: Stmt) -> Stmt | None:
    if not isinstance(stmt, tirx.AllocBuffer) or str(stmt.buffer.scope()) != "local":
        return None
    return tirx.AllocBuffer(stmt.buffer, {"disable_lower_builtin": tirx.const(1, "bool")})
