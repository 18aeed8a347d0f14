"""What every schedule rule is, in the manner of TVM's dlight."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.schedule.microarchitecture import Microarchitecture


class Rule(ScheduleRule):
    """One way to schedule a PrimFunc.

    A rule finds its anchor block, fuses what surrounds it, and returns None when it has no
    business with the function. An exception means "mine, but it did not work": the next rule is
    tried and the report says so.
    """

    #: Name in the report.
    name: str = ""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a function, or return None when the rule does not apply to it."""
        del tunable  # our rules choose without search
        return self.schedule(s_tir.Schedule(func), Microarchitecture.of(target))

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Transform the schedule in place and return it."""
        raise NotImplementedError
