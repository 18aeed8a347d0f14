"""Results that an interrupted run of the benchmark passes to the next one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Result
from benchmarks.unfinished import Unfinished

SETTINGS = {"rounds": 7, "contenders": ["eager", "tvmify"]}


def measured(model: str) -> list[Result]:
    burst = {"median_ms": 2.0, "minimum_ms": 1.5, "calls": 10}
    return [
        Result(model, 2, "eager", [burst], first_call_s=0.1, peak_mib=100.0, error=0.0),
        Result(model, 2, "tvmify", reason="it could not run"),
    ]


def test_the_next_run_has_the_results_of_an_interrupted_one(tmp_path: Path):
    path = tmp_path / "out" / "unfinished.json"
    first = Unfinished(path, SETTINGS)
    assert first.of("mlp_1", 2) == []
    first.add(measured("mlp_1"))
    first.add(measured("lstm"))

    second = Unfinished(path, SETTINGS)
    assert second.of("mlp_1", 2) == measured("mlp_1")
    assert second.of("lstm", 2) == measured("lstm")
    assert second.of("mlp_1", 1) == second.of("resnet18", 2) == []


def test_results_of_other_settings_are_not_used(tmp_path: Path):
    path = tmp_path / "unfinished.json"
    Unfinished(path, SETTINGS).add(measured("mlp_1"))
    other = Unfinished(path, SETTINGS | {"rounds": 3})
    assert other.of("mlp_1", 2) == []
    other.add(measured("lstm"))
    assert Unfinished(path, SETTINGS).of("mlp_1", 2) == []


def test_finished_run_leaves_no_file(tmp_path: Path):
    path = tmp_path / "unfinished.json"
    run = Unfinished(path, SETTINGS)
    run.add(measured("mlp_1"))
    run.finish()
    assert Unfinished(path, SETTINGS).of("mlp_1", 2) == []
    assert list(tmp_path.iterdir()) == []
