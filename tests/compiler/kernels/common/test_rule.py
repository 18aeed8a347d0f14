"""The order of rules: which one schedules a function, fails, or is not tried."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx

from tests.compiler.kernels.kernels import build, random, use_rules
from tvmify.compiler.kernels.common.rewriting import names_of
from tvmify.compiler.kernels.common.rule import Failure, Rule, RuleFailure
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.elementwise.rule import Elementwise
from tvmify.compiler.microarchitecture import Microarchitecture


class Noting(Rule):
    """Accepts no function, and records those that it was offered."""

    name = "noting"

    def __init__(self) -> None:
        self.seen: list[tirx.PrimFunc] = []

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Decline every function."""
        self.seen.append(sch.mod["main"])
        return None


class Failing(Rule):
    """Accepts every function, and changes it before it fails."""

    def __init__(self, name: str = "failing") -> None:
        self.name = name

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Raise an error of more than one line."""
        for loop in sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0]):
            sch.unroll(loop)
        raise ValueError("what a rule draws\nno such loop")


class Undecided(Failing):
    """Changes every function, and then declines it."""

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Decline every function."""
        with contextlib.suppress(ValueError):
            super().schedule(sch, machine)
        return None


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rules fail with a warning, as for users."""
    monkeypatch.delenv("TVMIFY_STRICT_COMPILER")


def doubled(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return relax.op.add(x, x)


@pytest.mark.usefixtures("lenient")
def test_failing_rule_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    use_rules(monkeypatch, Failing(), Elementwise())
    build(doubled, [random(6, 40)])
    (line,) = caplog.records
    assert line.name == "tvmify.compiler.kernels.common.rule"
    assert line.levelname == "WARNING"
    assert "'add': failing failed: ValueError: no such loop" in line.getMessage()
    assert line.exc_info is None, "TVM's errors show whole functions"
    assert "\n" not in caplog.text.rstrip()


@pytest.mark.usefixtures("lenient")
def test_traceback_of_failing_rule_is_for_debugging(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    use_rules(monkeypatch, Failing(), Elementwise())
    with caplog.at_level(logging.DEBUG, "tvmify.compiler.kernels.common.rule"):
        build(doubled, [random(6, 40)])
    (shown,) = [line for line in caplog.records if line.exc_info]
    assert shown.levelname == "DEBUG"
    assert "what a rule draws" in caplog.text


def test_failure_has_the_message_of_tvm_in_one_line():
    text = """ScheduleError: An error occurred in the schedule primitive 'compute-at'.

The IR with diagnostic is:
# from tvm.script import tirx as T
Error message: The scope is not a stage pipeline.
Definition of a scope that is a stage pipeline:
- The region cover property holds for every of its child blocks"""
    failure = Failure("conv2d", s_tir.ScheduleError(text))
    assert str(failure) == "conv2d failed: ScheduleError: The scope is not a stage pipeline"
    assert str(Failure("conv2d", ValueError())) == "conv2d failed: ValueError()"
    assert str(Failure("conv2d", ValueError(1000 * "long "))).count("long") < 100


@pytest.mark.usefixtures("lenient")
def test_next_rule_is_tried_after_a_failure(monkeypatch: pytest.MonkeyPatch):
    x = random(6, 40)
    plain = build(doubled, [x])
    use_rules(monkeypatch, Failing(), Noting(), Elementwise())
    built = build(doubled, [x])
    assert built.rules == {"elementwise (failing failed: ValueError: no such loop)"}
    tvm.ir.assert_structural_equal(built.kernel(), plain.kernel())
    np.testing.assert_array_equal(built.run([x]), x + x)


def test_declining_rule_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
):
    x = random(6, 40)
    plain = build(doubled, [x])
    use_rules(monkeypatch, Undecided("undecided"), Noting(), Elementwise())
    built = build(doubled, [x])
    assert built.rules == {"elementwise"}
    tvm.ir.assert_structural_equal(built.kernel(), plain.kernel())


def test_function_is_analysed_once_for_all_rules(
    monkeypatch: pytest.MonkeyPatch,
):
    made = []
    original = Schedule.__init__

    def noted(self: Schedule, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Schedule, "__init__", noted)
    use_rules(monkeypatch, Noting(), Noting(), Elementwise())
    build(doubled, [random(6, 40)])
    assert len(made) == 1


@pytest.mark.usefixtures("lenient")
def test_all_failed_rules_are_named(monkeypatch: pytest.MonkeyPatch):
    use_rules(monkeypatch, Failing("one"), Noting(), Failing("two"))
    built = build(doubled, [random(6, 40)])
    assert built.rules == {
        "unscheduled (one failed: ValueError: no such loop; two failed: ValueError: no such loop)"
    }
    assert "tirx.is_scheduled" not in built.kernel().attrs


@pytest.mark.usefixtures("lenient")
def test_slow_function_is_reserved_for_its_rule(monkeypatch: pytest.MonkeyPatch):
    """The last block of such a sum is shorter than its description says."""
    use_rules(monkeypatch, Failing(), Elementwise())
    with pytest.raises(RuleFailure, match="failing failed"):
        build(lambda _, x, y: relax.op.matmul(x, y), [random(40, 1103), random(1103, 16)])


def test_scheduled_function_is_marked():
    assert build(doubled, [random(6, 40)]).kernel().attrs["tirx.is_scheduled"]


def test_rule_sees_only_functions_with_its_anchors(monkeypatch: pytest.MonkeyPatch):
    plain = build(doubled, [random(6, 40)]).kernel()
    (block,) = names_of(plain.body.block.body)
    anchored, other = Noting(), Noting()
    anchored.anchors, other.anchors = frozenset({block}), frozenset({block, "another"})
    other.name = "other"
    use_rules(monkeypatch, anchored, other, Elementwise())
    assert build(doubled, [random(6, 40)]).rules == {"elementwise"}
    assert (len(anchored.seen), len(other.seen)) == (1, 0)
