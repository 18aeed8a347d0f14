"""Schedules of element-wise kernels: 16 bytes of adjacent elements for each thread.

Narrower accesses waste bandwidth. Kernels that only move elements are vectorized as a whole. In
others, only loads and stores are vectors, and a thread computes its elements one by one, which
allows all functions and dtypes: TVM's code generator has no vectors of eight float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import s_tir, sym, tirx
from tvm.ir import Call, Expr, Op, Range, TensorLoad, TensorRegion
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import ScheduleRule, try_inline
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target
from tvm.tirx import FloatImm, IntImm
from tvm_ffi import structural_walk

from tvmify.compiler.costs import GPU
from tvmify.compiler.cuda.gpus import VECTOR_DTYPES, vector_lanes
from tvmify.compiler.kernels.common.rewriting import uses
from tvmify.compiler.kernels.common.schedule import Schedule

_CHOICE = "prim.if_then_else"
#: Functions that TVM lowers for several elements at once.
_VECTOR_CALLS = frozenset(
    (_CHOICE, *(f"tirx.{name}" for name in "erf exp rsqrt sigmoid sqrt tanh".split()))
)


class Elementwise(ScheduleRule):
    """Let each thread read and write a few adjacent elements at once."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule one block without reductions, if its last axis is contiguous in all tensors."""
        del target, tunable
        sch = Schedule(func)
        infos = normalize_prim_func(sch)
        infos = None if infos is None else try_inline(sch, infos)
        if infos is None or len(infos) != 1 or not infos[0].is_injective():
            return None
        block = infos[0].block_rv
        about, loops = sch.get(block), sch.get_loops(block)
        if not loops or len(about.writes) != 1 or not _runs_along_memory(about):
            return None
        last = about.iter_vars[-1].var
        is_whole = _chooses_for_rows(about) and (
            _only_moves(about) or (bool(_choices(about)) and _is_for_vectors(about))
        )
        # TVM loads eight at once, or gathers four.
        lanes = _lanes(about, 8 if not is_whole or moves_vectors(about) else 4)
        if lanes is None:
            return None
        elements = math.prod(int(sch.get(loop).extent) for loop in loops)
        if (threads := threads_for(elements // lanes)) is None:
            return None
        thread, vector = _shared(sch, loops, threads, lanes)
        if is_whole:
            sch.vectorize(vector)
            return sch
        loaded = [
            sch.cache_read(block, index, "local")
            for index in _vectors_read(about)
            if _is_aligned(about.reads[index], last, lanes)
        ]
        stored = sch.cache_write(block, 0, "local")
        for copy in loaded:
            sch.compute_at(copy, thread)
        sch.reverse_compute_at(stored, thread)
        for copy in (*loaded, stored):
            sch.vectorize(sch.get_loops(copy)[-1])
        sch.unroll(vector)
        return sch


def threads_for(vectors: int) -> int | None:
    """Return the number of threads of a block, each with one vector; None if none fits."""
    most = GPU.elementwise_threads
    while most > GPU.fewest_elementwise_threads and vectors < most * GPU.multiprocessors:
        most //= 2
    if vectors <= GPU.elementwise_threads:
        return vectors
    fits = [threads for threads in range(most, GPU.warp - 1, -1) if vectors % threads == 0]
    return next((threads for threads in fits if threads % GPU.warp == 0), max(fits, default=None))


def _shared(
    sch: s_tir.Schedule, loops: Sequence[LoopRV], threads: int, lanes: int
) -> tuple[LoopRV, LoopRV]:
    """Divide loops among threads; return the loop over threads, and that of each thread."""
    *before, last = loops
    along, vector = sch.split(last, [None, lanes])
    blocks, thread = sch.split(sch.fuse(*before, along), [None, threads])
    sch.bind(blocks, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread, vector


def _lanes(block: s_tir.SBlock, most: int) -> int | None:
    """Return how many elements a thread has, such that no vector is wider than a load."""
    extent = int(block.iter_vars[-1].dom.extent)
    accesses = [*block.writes, *(block.reads[index] for index in _vectors_read(block))]
    lanes = min(most, *(vector_lanes(str(access.source.dtype)) for access in accesses))
    while lanes > 1 and extent % lanes:
        lanes //= 2
    return lanes if lanes > 1 and extent > 1 else None


def _is_aligned(access: TensorRegion, last: tirx.Var, lanes: int) -> bool:
    """Whether vectors begin at multiples of their size in each row."""
    is_along = bool(access.region) and uses(access.region[-1].min, [last])
    return not is_along or int(access.source.shape[-1]) % lanes == 0


def _runs_along_memory(block: s_tir.SBlock) -> bool:
    last = block.iter_vars[-1].var
    if str(block.writes[0].source.dtype) not in VECTOR_DTYPES:
        return False
    for access in (*block.reads, *block.writes):
        *before, at = [region.min for region in access.region] or [tirx.const(0)]
        if any(uses(index, [last]) for index in before):
            return False
        if uses(at, [last]) and not at.same_as(last):
            return False
    return True


def _vectors_read(block: s_tir.SBlock) -> list[int]:
    """Return which reads are of adjacent elements, and safe whatever the block's conditions are."""
    analyzer = sym.Analyzer()
    for var in block.iter_vars:
        analyzer.bind(var.var, var.dom)
    last = block.iter_vars[-1].var

    def is_inside(region: Range, extent: Expr) -> bool:
        is_one = isinstance(region.extent, IntImm) and int(region.extent) == 1
        at = region.min
        return is_one and analyzer.can_prove(at >= 0) and analyzer.can_prove(at < extent)

    return [
        index
        for index, access in enumerate(block.reads)
        if str(access.source.dtype) in VECTOR_DTYPES
        and access.region
        and access.region[-1].min.same_as(last)
        and all(map(is_inside, access.region, access.source.shape))
    ]


def _calls(block: s_tir.SBlock) -> list[Call]:
    found: list[Call] = []
    structural_walk(block.body, (Call, found.append))
    return found


def moves_vectors(block: s_tir.SBlock) -> bool:
    """Whether a block computes nothing, and may move 16 bytes of its last axis at once."""
    last = block.iter_vars[-1].var
    return (
        _only_moves(block)
        and _runs_along_memory(block)
        and _chooses_for_rows(block)
        and all(_is_aligned(access, last, 8) for access in block.reads)
    )


def _choices(block: s_tir.SBlock) -> list[Call]:
    return [call for call in _calls(block) if _name(call) == _CHOICE]


def _chooses_for_rows(block: s_tir.SBlock) -> bool:
    """Whether each condition is the same for adjacent elements along the last axis."""
    last = block.iter_vars[-1].var
    return not any(uses(choice.args[0], [last]) for choice in _choices(block))


def _name(call: Call) -> str:
    return call.op.name if isinstance(call.op, Op) else str(call.op)


def _only_moves(block: s_tir.SBlock) -> bool:
    """Whether a block computes nothing: each result is an element that it reads, or a constant."""

    def is_moved(value: Expr) -> bool:
        if isinstance(value, Call) and _name(value) == _CHOICE:
            return all(map(is_moved, value.args[1:]))
        return isinstance(value, (TensorLoad, FloatImm, IntImm))

    return isinstance(block.body, tirx.BufferStore) and is_moved(block.body.value)


def _is_for_vectors(block: s_tir.SBlock) -> bool:
    """Whether TVM can compute all of it in vectors."""
    accesses = (*block.reads, *block.writes)
    return {_name(call) for call in _calls(block)} <= _VECTOR_CALLS and all(
        str(access.source.dtype) in VECTOR_DTYPES for access in accesses
    )
