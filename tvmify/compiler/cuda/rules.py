"""Schedules for GPUs: TVM's own rules, each function by the first that takes it."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.ir import Call, Op
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import ScheduleRule, try_inline
from tvm.target import Target
from tvm_ffi import structural_walk

from tvmify.compiler.cuda.norms import Norm
from tvmify.compiler.cuda.row_products import ROW_PRODUCT, RowProduct
from tvmify.compiler.kernels.common.loops import find, is_reduction_loop
from tvmify.compiler.kernels.common.rewriting import uses

#: Elements that a thread reads and writes at once, and threads of a block.
_LANES, _THREADS = 4, 256
#: The most elements that one thread reduces.
_WINDOW = 64
_VECTOR_DTYPES = frozenset({"float16", "bfloat16", "float32"})
#: Functions that TVM lowers for several elements at once.
_VECTOR_CALLS = frozenset(f"tirx.{name}" for name in "erf exp rsqrt sigmoid sqrt tanh".split())


class Elementwise(ScheduleRule):
    """Let each thread read and write a few neighbours at once: narrow accesses waste bandwidth."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule one block without sums whose last axis runs along memory in all it touches."""
        del target, tunable
        sch = s_tir.Schedule(func)
        infos = normalize_prim_func(sch)
        infos = None if infos is None else try_inline(sch, infos)
        if infos is None or len(infos) != 1 or not infos[0].is_injective():
            return None
        loops = sch.get_loops(infos[0].block_rv)
        if not loops or not _runs_along_memory(sch.get(infos[0].block_rv)):
            return None
        blocks, threads, lanes = sch.split(sch.fuse(*loops), [None, _THREADS, _LANES])
        sch.bind(blocks, "blockIdx.x")
        sch.bind(threads, "threadIdx.x")
        sch.vectorize(lanes)
        return sch


def _runs_along_memory(block: s_tir.SBlock) -> bool:
    last = block.iter_vars[-1]
    if int(last.dom.extent) % _LANES or not _calls(block) <= _VECTOR_CALLS:
        return False
    for access in (*block.reads, *block.writes):
        if str(access.source.dtype) not in _VECTOR_DTYPES:
            return False
        *before, at = [region.min for region in access.region] or [tirx.const(0)]
        if any(uses(index, [last.var]) for index in before):
            return False
        if uses(at, [last.var]) and not at.same_as(last.var):
            return False
    return True


def _calls(block: s_tir.SBlock) -> set[str]:
    found: set[str] = set()

    def note(call: Call) -> None:
        found.add(call.op.name if isinstance(call.op, Op) else str(call.op))

    structural_walk(block.body, (Call, note))
    return found


class Window(ScheduleRule):
    """Let each thread reduce a few elements, as of a pool, in a register: TVM's last rule stores
    every step.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule one block that reduces little to each of many elements."""
        del target, tunable
        sch = s_tir.Schedule(func)
        infos = normalize_prim_func(sch)
        infos = None if infos is None else try_inline(sch, infos)
        if infos is None or len(infos) != 1 or not infos[0].is_reduction():
            return None
        block = infos[0].block_rv
        reduced = [loop for loop in sch.get_loops(block) if is_reduction_loop(sch, loop)]
        size = math.prod(int(sch.get(loop).extent) for loop in reduced)
        if len(sch.get(block).writes) != 1 or not 1 < size <= _WINDOW:
            return None
        stored = sch.cache_write(block, 0, "local")
        blocks, threads = sch.split(sch.fuse(*sch.get_loops(stored)), [None, _THREADS])
        sch.bind(blocks, "blockIdx.x")
        sch.bind(threads, "threadIdx.x")
        sch.compute_at(block, threads)
        first, *_ = (loop for loop in sch.get_loops(block) if is_reduction_loop(sch, loop))
        sch.decompose_reduction(block, first)
        return sch


class UnevenRowProduct(ScheduleRule):
    """TVM's own for products of a row that `RowProduct` leaves; a sum of another kind is none."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule what `tvmify.compiler.cuda.products` makes, and what was fused with it."""
        is_one = find(s_tir.Schedule(func), ROW_PRODUCT) is not None
        return gpu.GEMV().apply(func, target, tunable) if is_one else None


class OneKernel(ScheduleRule):
    """A rule less what it cuts into parts that leave each other something in global memory.

    TVM would take that from a pool of its own, which knows nothing of streams.
    """

    def __init__(self, rule: ScheduleRule) -> None:
        self.rule = rule

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool
    ) -> s_tir.Schedule | list[s_tir.Schedule] | None:
        """Schedule as the rule does."""
        found = self.rule.apply(func, target, tunable)
        if isinstance(found, s_tir.Schedule):
            buffers = found.mod["main"].body.block.alloc_buffers
            if any(str(buffer.scope()) == "global" for buffer in buffers):
                raise ValueError("its parts need memory between them")
        return found


#: Products of more than a row, and convolutions, are `tvmify.compiler.cuda.libraries`'s.
RULES: dict[str, ScheduleRule] = {
    "elementwise": OneKernel(Elementwise()),
    "row product": OneKernel(RowProduct()),
    "uneven row product": OneKernel(UnevenRowProduct()),
    "norm": OneKernel(Norm()),
    "reduction": OneKernel(gpu.Reduction()),
    "general reduction": OneKernel(gpu.GeneralReduction()),
    "window": OneKernel(Window()),
    "fallback": OneKernel(gpu.Fallback()),
}
