"""Schedules for GPUs: mostly TVM's own rules; the first that applies schedules a function."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.backend import Rule
from tvmify.compiler.cuda.elementwise import Elementwise
from tvmify.compiler.cuda.norms import Norm
from tvmify.compiler.cuda.row_products import ROW_PRODUCT, RowProduct
from tvmify.compiler.cuda.windows import Window
from tvmify.compiler.kernels.common.loops import blocks_of, find
from tvmify.compiler.kernels.common.rule import DlightRule
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.microarchitecture import Microarchitecture


class UnevenRowProduct(ScheduleRule):
    """TVM's own rule for products of a row that `RowProduct` leaves, and for no other sums."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a product of `tvmify.compiler.cuda.products`, with what was fused."""
        is_one = find(Schedule(func), ROW_PRODUCT) is not None
        return gpu.GEMV().apply(func, target, tunable) if is_one else None


class Nothing(Rule):
    """Computes nothing for results without elements: a launch of no threads is an error."""

    name = "nothing"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function all of whose blocks write to tensors without elements."""
        written = [w.source for block in blocks_of(sch) for w in sch.get(block).writes]
        if not written or any(all(int(n) for n in buffer.shape) for buffer in written):
            return None
        empty = s_tir.SBlock([], [], [], "root", tirx.Evaluate(0))
        return Schedule(sch.mod["main"].with_body(s_tir.SBlockRealize([], True, empty)))


class OneKernel(ScheduleRule):
    """A rule that leaves out functions which it would cut into kernels that share global memory.

    TVM would allocate that memory from its own pool, which ignores streams. It also leaves out
    those for which the rule asserts what it expects, where others of TVM's decline.
    """

    def __init__(self, rule: ScheduleRule) -> None:
        self.rule = rule

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool
    ) -> s_tir.Schedule | list[s_tir.Schedule] | None:
        """Schedule as the rule does, or return None."""
        try:
            found = self.rule.apply(func, target, tunable)
        except AssertionError:
            return None
        if isinstance(found, s_tir.Schedule):
            buffers = found.mod["main"].body.block.alloc_buffers
            if any(str(buffer.scope()) == "global" for buffer in buffers):
                return None
        return found


#: `tvmify.compiler.cuda.libraries` computes products of several rows, and convolutions.
_RULES: dict[str, ScheduleRule] = {
    "elementwise": Elementwise(),
    "row product": RowProduct(),
    "uneven row product": UnevenRowProduct(),
    "norm": Norm(),
    "reduction": gpu.Reduction(),
    "general reduction": gpu.GeneralReduction(),
    "window": Window(),
    "fallback": gpu.Fallback(),
}
RULES: dict[str, Rule] = {
    Nothing.name: Nothing(),
    **{name: DlightRule(name, OneKernel(rule)) for name, rule in _RULES.items()},
}
