"""Functions over tensors without elements."""

from __future__ import annotations

from tvm import s_tir

from tvmify.compiler.kernels.common.loops import blocks_of, extent
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.microarchitecture import Microarchitecture


class Empty(Rule):
    """A loop that never runs is left alone: no vector or tile divides it.

    A reduction over no elements has only its initial value, which would be set within that loop.
    """

    name = "empty"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Take the function if one of its loops has no iterations."""
        del machine
        never = {
            block: [loop for loop in sch.get_loops(block) if extent(sch, loop) == 0]
            for block in blocks_of(sch)
        }
        for block, loops in never.items():
            if loops and sch.get(block).init is not None:
                sch.decompose_reduction(block, loops[0])
        return sch if any(never.values()) else None
