"""A fixed part of PyTorch's operator samples, and every sample that ever failed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from conformance import records
from conformance.operators import (
    COMPILED,
    CRASHED,
    EAGER,
    OUTCOMES,
    WRONG,
    Applied,
    Case,
    Result,
    is_rounding,
    operators,
)
from conformance.opinfo import main
from conformance.opinfo_report import deviations, eager_reasons, totals
from conformance.shards import Plan, run, this_module, work

FAILED = Path(__file__).parents[2] / "conformance" / "failed.txt"
#: Every STEP-th of the 1,145 pairs of operator and dtype is tried.
STEP = 46


def test_sampled_operators_match_eager() -> None:
    found = {}
    for number, operator in enumerate(operators()[::STEP]):
        samples = list(operator.samples())
        case, arguments = samples[number % len(samples)]
        found[case] = operator.run(arguments)
    assert deviations(found) == []
    assert sum(result.outcome == EAGER for result in found.values()) < len(found)


def test_former_failures_match_eager() -> None:
    lines = [line for line in FAILED.read_text().splitlines() if not line.startswith("#")]
    cases = {Case.parse(line) for line in lines}
    names = frozenset(case.operator for case in cases)
    found = {
        case: operator.run(arguments)
        for operator in operators(names, {case.dtype for case in cases})
        for case, arguments in operator.samples()
        if case in cases
    }
    assert found.keys() == cases
    assert deviations(found) == []


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (torch.zeros(3), "not close"),
        (torch.ones(3, dtype=torch.float64), "dtype"),
        (torch.ones(1, 3), "shape"),
        ([torch.ones(3)], "instead of"),
        (RuntimeError("no"), "instead of a result"),
    ],
)
def test_difference_is_detected(arguments: object, difference: str) -> None:
    (operator,) = (op for op in operators(frozenset({"clone"})) if op.dtype == "float32")
    assert operator.difference(torch.ones(3), torch.ones(3)) == ""
    assert difference in operator.difference(arguments, torch.ones(3))


def test_nan_equals_nan_and_empty_has_no_values() -> None:
    clone, empty = (
        next(op for op in operators(frozenset({name})) if op.dtype == "float32")
        for name in ("clone", "empty")
    )
    nan = torch.tensor([float("nan"), 1])
    assert clone.difference(nan.clone(), nan) == ""
    assert clone.difference(torch.ones(2), nan) != ""
    assert empty.difference(torch.ones(2), nan) == ""
    assert empty.difference(torch.ones(3), nan) != ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_rounding_is_told_from_a_wrong_result(dtype: torch.dtype) -> None:
    arguments = [torch.tensor([0.3], dtype=dtype), torch.tensor([4.0], dtype=dtype)]
    module = Applied(lambda x, y: (x + y) - y, (arguments, {}))
    exact, rounded = arguments[0].clone(), module(*arguments)
    assert not rounded.equal(exact)
    assert is_rounding((exact, arguments), (rounded, arguments), module, arguments)
    assert not is_rounding((2 * exact, arguments), (rounded, arguments), module, arguments)


def test_other_dtypes_run_when_they_are_asked_for(tmp_path: Path) -> None:
    folder = ["--folder", str(tmp_path), "--shards", "1", "--jobs", "1", "--samples", "1"]
    main(["run", *folder, "--only", "sgn", "--dtypes", "bool,bfloat16"])
    assert {case.dtype for case in records.read(tmp_path)} == {"bool", "bfloat16"}
    with pytest.raises(SystemExit):
        main(["run", *folder, "--dtypes", "float33"])


def test_second_run_resumes(tmp_path: Path) -> None:
    plan = Plan(tmp_path, shards=1, samples=1, only=frozenset({"sgn"}), limit=60)
    said: list[Case] = []
    work(plan, 0, lambda case, _: said.append(case))
    assert said == [Case("sgn", "", "float32", 0), Case("sgn", "", "int64", 0)]
    assert records.read(tmp_path).keys() == set(said)
    with plan.results(0).open("a") as lines:
        lines.write('{"operator": "cut o')
    records.forget(tmp_path, lambda case, _: case.dtype == "int64")
    work(plan, 0, lambda case, _: said.append(case))
    assert said[2:] == [Case("sgn", "", "int64", 0)]


def test_crash_or_hang_is_counted_and_the_run_continues(tmp_path: Path) -> None:
    """The first process dies at a case, the second one hangs at another, the third one is fine."""
    script = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
turn = len(folder.joinpath("shard-0.jsonl").read_text().splitlines()) if list(
    folder.glob("*.jsonl")) else 0
if turn < 2:
    folder.joinpath("shard-0.case").write_text(f"add - float32 {turn}")
    os.abort() if turn == 0 else time.sleep(60)
"""
    plan = Plan(tmp_path, shards=1, samples=1, only=frozenset(), limit=1)
    command = [*this_module([])[:1], "-c", script, str(tmp_path)]
    run(plan, 1, command, lambda *_: None)
    reasons = [result.reason for result in records.read(tmp_path).values()]
    assert reasons == ["the process died: SIGABRT", "no end within 1 s"]
    assert {result.outcome for result in records.read(tmp_path).values()} == {CRASHED}


def test_unstartable_worker_is_an_error(tmp_path: Path) -> None:
    plan = Plan(tmp_path, shards=1, samples=1, only=frozenset(), limit=60)
    with pytest.raises(RuntimeError, match="before its first case"):
        run(plan, 1, [*this_module([])[:1], "-c", "raise SystemExit(3)"], lambda *_: None)


def test_the_report_counts_shares_reasons_and_deviations() -> None:
    outcomes = itertools.cycle(OUTCOMES)
    found = {Case("add", "", "float32", n): Result(next(outcomes)) for n in range(10)}
    found[Case("svd", "", "int64", 0)] = Result(
        EAGER, "UnsupportedOperator", "", ["aten._linalg_svd.default"]
    )
    found[Case("item", "", "int64", 0)] = Result(EAGER, "CaptureError", "a branch (/x/y.py:12)")
    header, single, _, both = totals(found)
    assert header[3:] == list(OUTCOMES)
    assert single[:4] == ["float32", "1", "10", "2 (20.0%)"]
    assert both[:3] == ["both", "3", "12"]
    reasons = eager_reasons(found)
    assert reasons["an operator has no converter"] == {"svd": 1}
    assert reasons["a branch"] == {"item": 1}
    assert len(deviations(found)) == 4
    assert {WRONG, CRASHED} == {line.split(": ")[1] for line in deviations(found)}
    assert COMPILED not in "".join(deviations(found))
