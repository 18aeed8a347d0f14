"""Split parallel loops so that the iterations of tasks differ by one at most. TVM rounds the share
of each task up: of 17 iterations, 8 of 16 tasks get two and one the last; of 8 iterations, the
tasks of the first of two threads get all, and the second must steal them. So a loop runs over
slots, the same number for each task, and iterations are spread evenly over the slots. The number of
slots for a symbolic number of iterations is a power of two, since a division takes as long as an
iteration of a few vectors.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.rewriting import rewrite_body
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: The number of tasks for two threads (`native/thread_pool.cpp`); more threads have a multiple.
_TASKS = 16
#: Loops of more iterations are balanced well enough.
_MANY = 64 * _TASKS
#: Of a loop with a symbolic number of iterations; enough for the tasks of 32 threads.
_SLOTS = 16 * _TASKS


@compiler_pass
class ShareEvenly:
    """Rewrite parallel loops, after the last pass that reads them."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(loop: Stmt) -> Stmt | None:
    if not isinstance(loop, tirx.For) or loop.kind != tirx.ForKind.PARALLEL:
        return None
    count = sizes.number_or_expression(loop.extent)
    if not isinstance(count, int):
        # In a variable, so that it is not computed in every iteration.
        number = tirx.Var("count", loop.extent.ty)
        return tirx.SeqStmt([tirx.Bind(number, count), _over_ranges(loop, number)])
    if not 1 < count < _MANY:
        return None
    slots = -(-count // _TASKS) * _TASKS
    return None if slots == count else _over_slots(loop, count, slots)


def _over_slots(loop: tirx.For, count: int, slots: int) -> Stmt:
    """Return a loop of which each slot has one iteration or none."""
    slot = tirx.Var("slot", loop.loop_var.ty)
    first, following = (tirx.truncdiv((slot + i) * count, slots) for i in range(2))
    body = tirx.SeqStmt([tirx.Bind(loop.loop_var, first), loop.body])
    taken = tirx.IfThenElse(first < following, body, None)
    extent = tirx.const(slots, str(loop.extent.ty.dtype))
    return tirx.For(slot, loop.min, extent, loop.kind, taken)


def _over_ranges(loop: tirx.For, count: Expr) -> Stmt:
    """Return a loop of which each slot has any number of iterations."""
    dtype = str(loop.extent.ty.dtype)
    slot, number, length = (tirx.Var(name, dtype) for name in ("slot", "number", "length"))
    wide = count.astype("int64")
    first, following = (
        tirx.truncdiv((slot.astype("int64") + i) * wide, _SLOTS).astype(dtype) for i in range(2)
    )
    body = tirx.SeqStmt([tirx.Bind(loop.loop_var, first + number), loop.body])
    own = tirx.For(number, tirx.const(0, dtype), length, tirx.ForKind.SERIAL, body)
    body = tirx.SeqStmt([tirx.Bind(length, following - first), own])
    return tirx.For(slot, loop.min, tirx.const(_SLOTS, dtype), loop.kind, body)
