"""Unroll loops over the lanes of a vector whose values are chosen by place in a short row.

TVM writes such a vector lane by lane, since one branch must not read memory for the other. LLVM
then takes ``x[8 * i + lane % 8]`` for sixteen consecutive elements, which it is not. Unrolled, each
lane knows its place and its branch.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import (
    collect,
    is_if_then_else,
    rewrite_body,
    uses,
)
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: The lanes of the longest vector, of bytes.
_MOST_LANES = 64


@compiler_pass
class UnrollLanes:
    """Mark the loops for ``UnrollLoop``; runs after vectorization."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(stmt: Stmt) -> Stmt | None:
    if not isinstance(stmt, tirx.For) or stmt.kind != tirx.ForKind.SERIAL:
        return None
    if not isinstance(stmt.extent, tirx.IntImm) or int(stmt.extent) > _MOST_LANES:
        return None
    if not isinstance(stmt.body, tirx.BufferStore) or not _chooses_by_place(stmt):
        return None
    return tirx.For(stmt.loop_var, stmt.min, stmt.extent, tirx.ForKind.UNROLLED, stmt.body)


def _chooses_by_place(loop: tirx.For) -> bool:
    """Whether a condition in a loop depends on the remainder of its variable."""
    choices = [call for call in collect(loop.body.value, Call) if is_if_then_else(call)]
    return any(
        uses(part, [loop.loop_var])
        for call in choices
        for part in collect(call.args[0], (tirx.FloorDiv, tirx.FloorMod))
    )
