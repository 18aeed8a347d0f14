"""Keep the registers of a kernel on the stack, where LLVM turns them into registers.

TVM takes every buffer above 1 KB from the workspace, and a tile of sums is one. LLVM keeps memory
that a function returned in registers only while nothing in the loop may write elsewhere: not
beside a prefetch, and with stores and loads around each loop. The stack's it always can.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import rewrite_body
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class SumsOnStack:
    """Tell TVM to leave allocations of scope ``local`` alone; runs before LowerTVMBuiltin."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(stmt: Stmt) -> Stmt | None:
    if not isinstance(stmt, tirx.AllocBuffer) or str(stmt.buffer.scope()) != "local":
        return None
    return tirx.AllocBuffer(stmt.buffer, {"disable_lower_builtin": tirx.const(1, "bool")})
