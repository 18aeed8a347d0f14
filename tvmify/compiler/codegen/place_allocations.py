"""Move each allocation to the innermost loop or block that contains all accesses, as TVM does. TVM
also describes which regions such a loop reads and writes. No pass after it needs them, and with
symbolic sizes they took half the time of a build.
"""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import rewrite, rewrite_body, with_loop_body
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class PlaceAllocations:
    """``s_tir.transform.PlanAndUpdateBufferAllocationLocation`` without the regions."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function, whose blocks have no ``init``."""
        buffers = _allocated(function)
        if not buffers:
            return function
        ancestors = s_tir.analysis.detect_buffer_access_lca(function)
        places: dict[Stmt, list[tirx.Var]] = {}
        for buffer in buffers:
            if (place := ancestors.get(buffer)) is not None:
                places.setdefault(place, []).append(buffer)

        def visit(stmt: Stmt) -> Stmt | None:
            if isinstance(stmt, tirx.For) and stmt in places:
                body = rewrite(stmt.body, visit)
                block = s_tir.SBlock([], [], [], "", body, alloc_buffers=places[stmt])
                return with_loop_body(stmt, s_tir.SBlockRealize([], True, block))
            if isinstance(stmt, s_tir.SBlockRealize):
                own = places.get(stmt.block, [])
                if own or len(stmt.block.alloc_buffers):
                    return with_buffers(stmt, rewrite(stmt.block.body, visit), own)
            return None

        return rewrite_body(function, visit)


def _allocated(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the buffers that a function allocates, in the order of its blocks."""
    found: list[tirx.Var] = []
    note = (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers))
    tvm_ffi.structural_walk(function.body, [note], order="pre")
    return found


def with_buffers(
    realize: s_tir.SBlockRealize, body: Stmt, buffers: list[tirx.Var]
) -> s_tir.SBlockRealize:
    """Return a block with another body and other allocations."""
    block = realize.block
    return s_tir.SBlockRealize(
        realize.iter_values,
        realize.predicate,
        s_tir.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            body,
            alloc_buffers=buffers,
            match_buffers=block.match_buffers,
            annotations=block.annotations,
        ),
    )
