"""Split parallel loops so that the iterations of tasks differ by one at most. TVM rounds the share
of each task up: of 17 iterations, 8 of 16 tasks get two and one the last; of 8 iterations, the
tasks of the first of two threads get all, and the second must steal them. So a loop runs over
slots, the same number for each task, and iterations are spread evenly over the slots.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.rewriting import rewrite_body
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.sizes import Size

#: The number of tasks for two threads (`native/thread_pool.cpp`); more threads have a multiple.
_TASKS = 16
#: Loops of more iterations are balanced well enough.
_MANY = 64 * _TASKS


@compiler_pass
class ShareEvenly:
    """Rewrite parallel loops, after the last pass that reads them."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(loop: Stmt) -> Stmt | None:
    if not isinstance(loop, tirx.For) or loop.kind != tirx.ForKind.PARALLEL:
        return None
    dtype = str(loop.extent.ty.dtype)
    count = sizes.number_or_expression(loop.extent)
    if not isinstance(count, int):
        # In a variable, so that it is not computed in every iteration.
        number = tirx.Var("count", loop.extent.ty)
        slots = tirx.truncdiv(number + (_TASKS - 1), tirx.const(_TASKS, dtype)) * _TASKS
        return tirx.SeqStmt([tirx.Bind(number, count), _over_slots(loop, number, slots)])
    if not 1 < count < _MANY:
        return None
    slots = -(-count // _TASKS) * _TASKS
    return None if slots == count else _over_slots(loop, count, slots)


def _over_slots(loop: tirx.For, count: Size, slots: Size) -> Stmt:
    slot = tirx.Var("slot", loop.loop_var.ty)
    first, following = (tirx.truncdiv((slot + i) * count, slots) for i in range(2))
    body = tirx.SeqStmt([tirx.Bind(loop.loop_var, first), loop.body])
    taken = tirx.IfThenElse(first < following, body, None)
    extent = tirx.const(slots, str(loop.extent.ty.dtype)) if isinstance(slots, int) else slots
    return tirx.For(slot, loop.min, extent, loop.kind, taken)
