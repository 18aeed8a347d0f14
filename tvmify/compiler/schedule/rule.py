"""What every schedule rule is, in the manner of TVM's dlight."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

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


@dataclass
class Outcome:
    """What became of a function: the rule that scheduled it, and those that failed before."""

    rule: str | None = None
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (self.rule or "unscheduled") + f" ({'; '.join(self.failures)})" * bool(self.failures)


class Attempt(ScheduleRule):
    """A rule as dlight's ``ApplyDefaultSchedule`` is to try it.

    That tells nobody which rule had which function, and an error would end it: both are noted
    here.
    """

    def __init__(self, rule: Rule, outcomes: defaultdict[tirx.PrimFunc, Outcome]) -> None:
        self.rule, self.outcomes = rule, outcomes

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a function, or return None: another rule is to try it."""
        outcome = self.outcomes[func]
        try:
            schedule = self.rule.apply(func, target, tunable)
        except Exception as error:  # TVM's errors share no narrower class
            message = str(error).strip().splitlines()
            outcome.failures.append(
                f"{self.rule.name} failed: {message[-1] if message else repr(error)}"
            )
            return None
        if schedule is not None:
            outcome.rule = self.rule.name
        return schedule
