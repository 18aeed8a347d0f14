"""What every schedule rule is, in the manner of TVM's dlight, and how rules take turns."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm import s_tir, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.s_tir.dlight.base import ApplyDefaultSchedule, ScheduleRule
from tvm.target import Target

from tvmify.compiler.kernels.common.guards import names_of
from tvmify.compiler.kernels.common.last_block import is_open_ended
from tvmify.compiler.microarchitecture import Microarchitecture

#: The attribute by which dlight knows what is scheduled.
_CLAIM = "tirx.is_scheduled"
#: Environment variable under which a rule that fails ends the compilation: tests set it to "1".
STRICT = "TVMIFY_STRICT_RULES"

_LOG = logging.getLogger(__name__)


class RuleFailure(Exception):
    """A rule raised an error on a function that has its anchors."""


class Rule(ScheduleRule):
    """One way to schedule a PrimFunc.

    A rule finds its anchor block, fuses what surrounds it, and returns None when it has no
    business with the function. An exception means "mine, but it did not work", which is a mistake
    in the rule: the next rule is tried, and the report and a warning in the log say so. Where the
    environment variable `STRICT` is set, or the function is `open_ended`, it is an error. Either
    way, what it did to the schedule is forgotten.
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


@dataclass(frozen=True)
class Failure:
    """A rule, by its name, and the error that it raised."""

    rule: str
    error: Exception

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines()
        said = f"{type(self.error).__name__}: {lines[-1]}" if lines else repr(self.error)
        return f"{self.rule} failed: {said}"


@dataclass
class Outcome:
    """What became of a function.

    Attributes
    ----------
    rule
        The name of the rule that scheduled it; None where none did.
    failures
        Of those that were tried before.
    """

    rule: str | None = None
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        failures = "; ".join(map(str, self.failures))
        return (self.rule or "unscheduled") + f" ({failures})" * bool(failures)


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
                outcome.failures.append(Failure(name, error))
                fresh = None  # what stopped half-way may be neither the old schedule nor a new one
                if is_open_ended(func):
                    return None
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

    Raises
    ------
    RuleFailure
        A rule failed, and the environment variable `STRICT` is ``"1"``, or no other rule may
        schedule the function.
    """
    # dlight passes over what claims to be scheduled.
    tried = {variable: f.without_attr(_CLAIM) for variable, f in functions.items()}
    in_turn = _InTurn(rules)
    with target:
        scheduled = ApplyDefaultSchedule(in_turn)(IRModule(tried))
    outcomes = {variable: in_turn.outcomes[f] for variable, f in tried.items()}
    # Not in the pass, out of which an error would come as TVM's own.
    for variable, outcome in outcomes.items():
        for failure in outcome.failures:
            message = f"schedule rule on {variable.name_hint!r}: {failure}"
            if os.environ.get(STRICT) == "1" or is_open_ended(functions[variable]):
                raise RuleFailure(message) from failure.error
            _LOG.warning("%s; the next rule is tried", message, exc_info=failure.error)
    return scheduled, outcomes
