"""Functions over tensors without elements."""

from __future__ import annotations

from tvm import s_tir

from tvmify.compiler.kernels.common.loops import blocks_of, extent
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.microarchitecture import Microarchitecture


class Empty(Rule):
    """A loop that never runs is left alone: no vector or tile divides it."""

    name = "empty"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Take the function if one of its loops has no iterations."""
        del machine
        loops = (loop for block in blocks_of(sch) for loop in sch.get_loops(block))
        return sch if any(extent(sch, loop) == 0 for loop in loops) else None
