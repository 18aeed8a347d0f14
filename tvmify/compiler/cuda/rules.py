"""Schedules for GPUs: TVM's own rules, each function by the first that takes it."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import ScheduleRule, try_inline
from tvm.target import Target

from tvmify.compiler.cuda.elementwise import Elementwise
from tvmify.compiler.cuda.norms import Norm
from tvmify.compiler.cuda.row_products import ROW_PRODUCT, RowProduct
from tvmify.compiler.kernels.common.loops import find, is_reduction_loop

#: Threads of a block.
_THREADS = 256
#: The most elements that one thread reduces.
_WINDOW = 64


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
