"""Cut parallel loops so that all tasks have as many iterations, but for one.

TVM gives each task its share rounded up: of 17 iterations, 8 of 16 tasks get two and one the last,
and of 8 iterations, the tasks of the first of two threads get all, which the second one then has to
take from it. So a loop runs over slots, of which each task has as many, and iterations are spread
evenly over the slots.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import rewrite_body
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: As many tasks as two threads have (`native/thread_pool.cpp`); more threads have a multiple.
_TASKS = 16
#: What rounding leaves to one task of a loop of so many iterations is nothing.
_MANY = 64 * _TASKS


@compiler_pass
class ShareEvenly:
    """Rewrite parallel loops, when nothing looks at them any more."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(loop: Stmt) -> Stmt | None:
    if not isinstance(loop, tirx.For) or loop.kind != tirx.ForKind.PARALLEL:
        return None
    if not isinstance(loop.extent, tirx.IntImm) or not 1 < int(loop.extent) < _MANY:
        return None
    count = int(loop.extent)
    slots = -(-count // _TASKS) * _TASKS
    if slots == count:
        return None
    slot = tirx.Var("slot", loop.loop_var.ty)
    first, following = (tirx.truncdiv((slot + i) * count, slots) for i in range(2))
    body = tirx.SeqStmt([tirx.Bind(loop.loop_var, first), loop.body])
    taken = tirx.IfThenElse(first < following, body, None)
    return tirx.For(slot, loop.min, tirx.const(slots, str(loop.extent.ty.dtype)), loop.kind, taken)
