"""How the startup benchmark summarizes the times of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import startup


def answer(first_call: float, result: str = "same", **stages: float) -> dict[str, Any]:
    times = {
        "import torch": (1000.0, 900.0),
        "build the module": (100.0, 90.0),
        "import tvmify": (50.0, 40.0),
        "first call": (first_call, first_call / 2),
        "second call": (7.0, 7.0),
    }
    return {"times": times, "stages": stages, "result": result}


def test_torch_and_the_module_do_not_count() -> None:
    assert startup.beyond(answer(300.0)["times"]) == (350.0, 190.0)


def test_ratios_are_of_medians(capsys: pytest.CaptureFixture[str]) -> None:
    warm = [answer(seconds, capture=80.0) for seconds in (50.0, 150.0, 9000.0)]
    summary = startup.report(warm, [answer(3950.0, capture=100.0, build=3000.0)])
    assert summary["warm"]["beyond"] == [200.0, 115.0]
    assert summary["ratio"][0] == pytest.approx(200 / 4000)
    startup.show(summary)
    shown = capsys.readouterr().out
    assert "5.0%" in shown and "met" in shown and "build" in shown
    startup.show(startup.report(warm, [answer(1500.0)]))
    assert "MISSED" in capsys.readouterr().out


def test_cold_processes_are_spread_among_warm_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, bool]] = []

    def run(cache: Path, bytecode: Path, is_warm: bool) -> dict[str, Any]:
        runs.append((cache.name, is_warm))
        return answer(1.0)

    monkeypatch.setattr(startup, "run", run)
    warm, cold = startup.measure(4, 2)
    assert (len(warm), len(cold)) == (4, 2)
    assert runs[0] == ("full", False)  # fills the cache
    assert [is_warm for _, is_warm in runs[2:]] == [True, False, True, True, False, True]
    assert len({name for name, is_warm in runs[2:] if not is_warm}) == 2


def test_other_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr(startup, "run", lambda *_, **__: answer(1.0, str(next(numbers))))
    with pytest.raises(SystemExit, match="different numbers"):
        startup.measure(2, 1)
