"""How schedule rules are tried in turn, like those of TVM's dlight."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tvm import s_tir, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.s_tir.dlight.base import ApplyDefaultSchedule, ScheduleRule
from tvm.target import Target

from tvmify.compiler.backend import Rule
from tvmify.compiler.kernels.common.last_block import is_open_ended
from tvmify.compiler.kernels.common.rewriting import names_of
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.errors import headline
from tvmify.system import variables

#: dlight's attribute of scheduled functions.
_CLAIM = "tirx.is_scheduled"

_LOG = logging.getLogger(__name__)
#: How TVM begins the line of an error that says what is wrong.
_TOLD = "Error message: "


class RuleFailure(Exception):
    """A rule raised an error on a function that has its anchors."""


class DlightRule(Rule):
    """A rule of TVM's dlight, or one in its form: it makes a schedule of its own."""

    def __init__(self, name: str, rule: ScheduleRule) -> None:
        self.name, self.rule = name, rule

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule the function for the current target."""
        target = Target.current(allow_none=False)
        found = self.rule.apply(sch.mod["main"], target, tunable=False)
        return found if isinstance(found, s_tir.Schedule) else None


@dataclass(frozen=True)
class Failure:
    """A rule, by its name, and the error that it raised."""

    rule: str
    error: Exception

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines()
        # TVM shows a function before what it says of it, and rules of its own after.
        told = (line for line in lines if line.startswith(_TOLD))
        line = next(told, lines[-1] if lines else "").removeprefix(_TOLD)
        said = f"{type(self.error).__name__}: {headline(line)}" if line else repr(self.error)
        return f"{self.rule} failed: {said}"


@dataclass
class Outcome:
    """The outcome for a function.

    Attributes
    ----------
    rule
        The name of the rule that scheduled it, or None.
    failures
        The failures of rules that were tried before.
    """

    rule: str | None = None
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        failures = "; ".join(map(str, self.failures))
        return (self.rule or "unscheduled") + f" ({failures})" * bool(failures)


class _InTurn(ScheduleRule):
    """All rules as one for dlight's ``ApplyDefaultSchedule``. dlight does not report which rule
    scheduled a function, and stops at an error: `outcomes` records both.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self.outcomes: defaultdict[tirx.PrimFunc, Outcome] = defaultdict(Outcome)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a function by the first rule that takes it."""
        del tunable  # our rules choose without search
        outcome, blocks, machine = self.outcomes[func], _blocks(func), Microarchitecture.of(target)
        fresh: s_tir.Schedule | None = None
        for name, rule in self.rules.items():
            if not rule.anchors <= blocks:
                continue
            try:
                # Creating a schedule takes longer than most rules need to find no anchor.
                if fresh is None or not fresh.mod["main"].same_as(func):
                    fresh = Schedule(func)
                schedule = rule.schedule(fresh, machine)
            except Exception as error:  # TVM's errors share no narrower class
                outcome.failures.append(Failure(name, error))
                fresh = None  # a rule that failed half-way may leave an inconsistent schedule
                if is_open_ended(func):
                    return None
                continue
            if schedule is not None:
                outcome.rule = name
                return schedule
        return None


def _blocks(function: tirx.PrimFunc) -> set[str]:
    """Names of the blocks below the root."""
    body = function.body
    return names_of(body.block.body if isinstance(body, s_tir.SBlockRealize) else body)


class ScheduledInTurn(NamedTuple):
    """Functions, scheduled where their outcome has a rule, and the outcome of each."""

    ir_mod: IRModule
    outcomes: dict[GlobalVar, Outcome]


def apply_in_turn(
    rules: Mapping[str, Rule], functions: Mapping[GlobalVar, tirx.PrimFunc], target: Target
) -> ScheduledInTurn:
    """Schedule functions, each by the first rule that takes it.

    If a rule raises an error, its schedule is dropped, the next rule is tried, the outcome has the
    error, and a warning is logged.

    Parameters
    ----------
    rules
        The rules by name.

    Raises
    ------
    RuleFailure
        A rule failed, and ``TVMIFY_STRICT_COMPILER`` is set, or no other rule may schedule the
        function.
    """
    # dlight skips functions with this attribute.
    tried = {variable: f.without_attr(_CLAIM) for variable, f in functions.items()}
    in_turn = _InTurn(rules)
    with target:
        scheduled = ApplyDefaultSchedule(in_turn)(IRModule(tried))
    outcomes = {variable: in_turn.outcomes[f] for variable, f in tried.items()}
    # Not inside the pass, which would turn the error into one of TVM's.
    for variable, outcome in outcomes.items():
        for failure in outcome.failures:
            message = f"schedule rule on {variable.name_hint!r}: {failure}"
            if variables.strict_compiler() or is_open_ended(functions[variable]):
                raise RuleFailure(message) from failure.error
            _LOG.warning("%s; the next rule is tried", message)
            # TVM's errors show whole functions.
            _LOG.debug("where the schedule rule failed", exc_info=failure.error)
    return ScheduledInTurn(scheduled, outcomes)
