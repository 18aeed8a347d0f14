"""What every schedule rule is, in the manner of TVM's dlight, and how rules take turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm import s_tir, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.s_tir.dlight.base import ApplyDefaultSchedule, ScheduleRule
from tvm.target import Target

from tvmify.compiler.schedule.guards import names_of
from tvmify.compiler.schedule.microarchitecture import Microarchitecture

#: The attribute by which dlight knows what is scheduled.
_CLAIM = "tirx.is_scheduled"


class Rule(ScheduleRule):
    """One way to schedule a PrimFunc.

    A rule finds its anchor block, fuses what surrounds it, and returns None when it has no
    business with the function. An exception means "mine, but it did not work": the next rule is
    tried and the report says so. Either way, what it did to the schedule is forgotten.
    """

    #: Name in the report.
    name: str = ""
    #: Blocks that a function must have, all of them, for the rule to be tried.
    anchors: frozenset[str] = frozenset()

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a function, or return None when the rule does not apply to it."""
        del tunable  # our rules choose without search
        if not self.anchors <= _blocks(func):
            return None
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


class _InTurn(ScheduleRule):
    """Rules as one that dlight's ``ApplyDefaultSchedule`` can try.

    That tells nobody which rule had which function, and an error would end it: both are noted
    in `outcomes`.
    """

    def __init__(self, rules: Mapping[str, ScheduleRule]) -> None:
        self.rules = rules
        self.outcomes: defaultdict[tirx.PrimFunc, Outcome] = defaultdict(Outcome)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a function by the first rule that takes it."""
        outcome = self.outcomes[func]
        blocks = _blocks(func)
        fresh: s_tir.Schedule | None = None
        for name, rule in self.rules.items():
            try:
                if isinstance(rule, Rule):
                    if not rule.anchors <= blocks:
                        continue
                    # To make a schedule takes longer than most rules need to find no anchor in it.
                    if fresh is None or not fresh.mod["main"].same_as(func):
                        fresh = s_tir.Schedule(func)
                    schedule = rule.schedule(fresh, Microarchitecture.of(target))
                else:
                    schedule = rule.apply(func, target, tunable)
            except Exception as error:  # TVM's errors share no narrower class
                message = str(error).strip().splitlines()
                said = f"{type(error).__name__}: {message[-1]}" if message else repr(error)
                outcome.failures.append(f"{name} failed: {said}")
                fresh = None  # what stopped half-way may be neither the old schedule nor a new one
                continue
            if isinstance(schedule, s_tir.Schedule):
                outcome.rule = name
                return schedule
        return None


def _blocks(function: tirx.PrimFunc) -> set[str]:
    """Names of the blocks below the root."""
    body = function.body
    return names_of(body.block.body if isinstance(body, s_tir.SBlockRealize) else body)


def apply_in_turn(
    rules: Mapping[str, ScheduleRule], functions: Mapping[GlobalVar, tirx.PrimFunc], target: Target
) -> tuple[IRModule, dict[GlobalVar, Outcome]]:
    """Schedule functions, each by the first rule that takes it.

    Parameters
    ----------
    rules
        By the names that outcomes have of them.

    Returns
    -------
    ir_mod
        The functions, scheduled where their outcome has a rule.
    outcomes
        What became of each.
    """
    # dlight passes over what claims to be scheduled.
    tried = {variable: f.without_attr(_CLAIM) for variable, f in functions.items()}
    in_turn = _InTurn(rules)
    with target:
        scheduled = ApplyDefaultSchedule(in_turn)(IRModule(tried))
    return scheduled, {variable: in_turn.outcomes[f] for variable, f in tried.items()}
