"""Reductions of windows, such as pools: each thread computes a few adjacent results.

What a step reads is kept in registers, so that it is read once, however often the step uses it; by
16 bytes if adjacent results read adjacent elements, as with channels last.
"""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.ir import TensorRegion
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.costs import GPU
from tvmify.compiler.cuda.elementwise import moves_vectors, threads_for
from tvmify.compiler.cuda.gpus import FLOAT_DTYPES, vector_lanes
from tvmify.compiler.kernels.common.loops import is_reduction_loop
from tvmify.compiler.kernels.common.rewriting import uses
from tvmify.compiler.kernels.common.schedule import Schedule


class Window(ScheduleRule):
    """Schedules one block that reduces few elements to each result, perhaps after padding."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule the windows of a few adjacent results for each thread."""
        del target, tunable
        sch = Schedule(func)
        infos = normalize_prim_func(sch)
        if infos is None or not infos[-1].is_reduction():
            return None
        *producers, window = infos
        block = window.block_rv
        reduced = [loop for loop in sch.get_loops(block) if is_reduction_loop(sch, loop)]
        size = math.prod(int(sch.get(loop).extent) for loop in reduced)
        if len(sch.get(block).writes) != 1 or not 1 < size <= GPU.window:
            return None
        if not all(producer.is_injective() for producer in producers):
            return None
        read = next(iter(producers[-1:]), None)
        for producer in producers[:-1]:
            sch.compute_inline(producer.block_rv)
        loaded = sch.cache_read(block, 0, "local") if read is None else read.block_rv
        if read is not None:
            sch.set_scope(loaded, 0, "local")
        lanes = _lanes(sch.get(block)) if moves_vectors(sch.get(loaded)) else 1
        elements = math.prod(int(extent) for extent in sch.get(block).writes[0].source.shape)
        threads = threads_for(elements // lanes) if lanes > 1 else None
        if threads is None:
            threads, lanes = GPU.window_threads, 1
        stored = sch.cache_write(block, 0, "local")
        *outer, last = (loop for loop in sch.get_loops(block) if not is_reduction_loop(sch, loop))
        along, neighbour = sch.split(last, [None, lanes])
        sch.reorder(*outer, along, *reduced, neighbour)
        blocks, thread = sch.split(sch.fuse(*outer, along), [None, threads])
        sch.bind(blocks, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.reverse_compute_at(stored, thread)
        sch.compute_at(loaded, reduced[-1])
        if lanes > 1:
            for copy in (stored, loaded):
                sch.vectorize(sch.get_loops(copy)[-1])
        sch.unroll(neighbour)
        sch.decompose_reduction(block, reduced[0])
        return sch


def _lanes(block: s_tir.SBlock) -> int:
    """Return how many adjacent results a thread computes."""
    (written,) = block.writes
    along = written.region[-1].min
    if not all(_has_neighbours(access, along) for access in (written, *block.reads)):
        return 1
    lanes = vector_lanes(str(written.source.dtype))
    while lanes > 1 and int(written.source.shape[-1]) % lanes:
        lanes //= 2
    return lanes


def _has_neighbours(access: TensorRegion, along: tirx.Var) -> bool:
    """Whether the last axis of an access, and no other, is this variable."""
    *before, last = (region.min for region in access.region)
    is_known = str(access.source.dtype) in FLOAT_DTYPES
    return is_known and last.same_as(along) and not any(uses(index, [along]) for index in before)
