"""How a product of one row with a weight is computed: a few threads for each row of the weight.

Only loading the weight takes time. So each thread loads 16 bytes at once, adjacent to those of its
neighbours, and several times before it uses the first; and there are blocks for all
multiprocessors. The threads of a row add their sums through registers, before the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.costs import GPU
from tvmify.compiler.cuda.gpus import vector_lanes
from tvmify.compiler.kernels.common.loops import find
from tvmify.compiler.kernels.common.schedule import Schedule

#: Name of the block in such kernels.
ROW_PRODUCT = "row_product"


@dataclass(frozen=True)
class Shape:
    """How the threads of a kernel share a weight.

    Attributes
    ----------
    rows
        Rows of a block.
    threads
        Threads of a row.
    lanes
        Elements that a thread loads at once.
    """

    rows: int
    threads: int
    lanes: int

    @classmethod
    def of(cls, rows: int, length: int, dtype: str) -> Shape | None:
        """Return the shape for a weight of `rows` rows; None if loads would be narrower."""
        lanes = vector_lanes(dtype)
        loads, rest = divmod(length, lanes * GPU.warp)
        if rest:
            return None
        threads = GPU.warp
        while loads % 2 == 0 and threads < GPU.most_row_threads:
            if loads <= GPU.row_loads and rows * threads >= GPU.multiprocessors * GPU.row_threads:
                break
            threads, loads = 2 * threads, loads // 2
        while (
            threads > GPU.fewest_row_threads
            and 2 * loads <= GPU.most_row_loads
            and rows * threads > GPU.multiprocessors * GPU.resident_threads
        ):
            threads, loads = threads // 2, 2 * loads
        # Enough blocks for all multiprocessors, if there are as many rows. If no usual size divides
        # the rows, larger blocks are better than blocks of one row.
        most = GPU.row_threads // threads
        several = [*range(most, 1, -1), *range(most + 1, 4 * most + 1)]
        fits = (n for n in several if rows % n == 0 and rows // n >= GPU.multiprocessors)
        return cls(next(fits, 1), threads, lanes)


class RowProduct(ScheduleRule):
    """Schedules the products of `tvmify.compiler.cuda.products`, with what was fused."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a product whose rows threads can share evenly."""
        del target, tunable
        sch = Schedule(func)
        product = find(sch, ROW_PRODUCT)
        if product is None:
            return None
        *ones, across, along = sch.get_loops(product)
        weight = sch.get(product).reads[1].source
        rows, length = int(sch.get(across).extent), int(sch.get(along).extent)
        shape = Shape.of(rows, length, str(weight.dtype))
        if shape is None:
            return None
        *before, last = sch.get_child_blocks(sch.get_sblock("root"))
        for block in before:
            if not sch.get(block).same_as(sch.get(product)):
                sch.compute_inline(block)
        blocks, of_block = sch.split(sch.fuse(*ones, across), [None, shape.rows])
        steps, threads, lanes = sch.split(along, [None, shape.threads, shape.lanes])
        sch.reorder(threads, steps, lanes)
        sch.bind(blocks, "blockIdx.x")
        sch.bind(of_block, "threadIdx.y")
        sch.bind(threads, "threadIdx.x")
        for index in range(2):
            loaded = sch.cache_read(product, index, "local", [product])
            sch.compute_at(loaded, steps)
            sch.vectorize(sch.get_loops(loaded)[-1])
        if not sch.get(last).same_as(sch.get(product)):
            sch.set_scope(product, 0, "local")
            sch.reverse_compute_at(last, of_block)
        for loop in (steps, lanes):
            sch.annotate(loop, "pragma_auto_unroll_max_step", 1024)
            sch.annotate(loop, "pragma_unroll_explicit", 0)
        return sch
