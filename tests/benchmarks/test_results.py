"""The arithmetic behind the benchmark's table."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.contenders import CONTENDERS
from benchmarks.goals import goals
from benchmarks.models import MODELS, chosen
from benchmarks.results import Result, Row, geometric_mean, rows
from benchmarks.run import write
from benchmarks.table import measurements, show


def measured(model: str, contender: str, *medians: float, first: float = 1.0) -> Result:
    bursts = [{"median_ms": m, "minimum_ms": m / 2, "calls": 5} for m in medians]
    return Result(model, 2, contender, bursts, first, peak_mib=100.0, error=1e-7)


def missing(model: str, contender: str) -> Result:
    return Result(model, 2, contender, reason="ModuleNotFoundError: No module named 'openvino'")


def resnet(ours: float = 2.0) -> Row:
    return Row(
        [
            measured("resnet18", "eager", 10.0, 8.0, 90.0),
            measured("resnet18", "freezing", 4.0, first=12.0),
            missing("resnet18", "openvino"),
            measured("resnet18", "tvmify", ours, first=3.0),
        ]
    )


def test_a_result_is_the_median_of_medians_and_the_minimum_of_minima() -> None:
    result = measured("resnet18", "eager", 10.0, 8.0, 90.0)
    assert result.median_ms == 10.0
    assert result.minimum_ms == 4.0
    assert result.record()["median_ms"] == 10.0


def test_ratios_are_to_the_fastest_peer_and_to_eager() -> None:
    row = resnet()
    assert row.best_peer == "freezing"
    assert row.to_best_peer == 0.5
    assert row.to_eager == 0.2
    assert row.first_call == 0.25


def test_no_ratio_without_a_peer() -> None:
    row = Row([missing("resnet18", "openvino"), measured("resnet18", "tvmify", 2.0)])
    assert row.best_peer is None
    assert row.to_best_peer is None
    assert row.to_eager is None


def test_results_are_grouped_by_model_and_threads() -> None:
    one = Result("resnet18", 1, "eager")
    grouped = rows([one, measured("resnet18", "eager", 1.0), measured("resnet18", "tvmify", 1.0)])
    assert [(row.threads, len(row.results)) for row in grouped] == [(1, 1), (2, 2)]


def test_geometric_mean_skips_missing_values() -> None:
    assert geometric_mean([0.5, None, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([None]) is None


def test_goals_are_met_up_to_their_bound() -> None:
    fast = {(goal.subject, goal.measure): goal.met for goal in goals([resnet(2.0)])}
    slow = {(goal.subject, goal.measure): goal.met for goal in goals([resnet(3.21)])}
    assert fast["resnet18", "tvmify / best peer"]
    assert not slow["resnet18", "tvmify / best peer"]
    assert slow["worst model", "tvmify / best peer"]
    assert fast["first call, geometric mean", "tvmify / freezing"]
    assert all(goal.subject != "vgg16" for goal in goals([resnet()]))


def test_unmeasured_goal_is_not_met() -> None:
    (row,) = rows([measured("resnet18", "tvmify", 1.0)])
    assert not any(goal.met for goal in goals([row]))


def test_the_table_leaves_blanks_and_says_why() -> None:
    console = Console(file=io.StringIO(), record=True, width=160)
    row = resnet()
    row.results["tvmify"].remark = "runs in eager PyTorch: no"
    show(console, [row], goals([row]), "a processor")
    printed = console.export_text()
    assert "resnet18, OpenVINO: ModuleNotFoundError: No module named 'openvino'" in printed
    assert "resnet18, tvmify: runs in eager PyTorch: no" in printed
    assert "2.00 *" in printed


def test_failed_contender_has_an_empty_cell() -> None:
    alone = Row([measured("dlrm", "tvmify", 1.0)])  # no other contender was measured
    table = measurements([resnet(), alone], ["freezing", "openvino", "tvmify"], "a processor")
    cells = [list(column.cells) for column in table.columns[2:]]
    blank = [[str(cell) == "" for cell in column] for column in cells]
    freezing, openvino, ours, to_peer, to_eager = blank
    assert openvino == [True, True]
    assert ours == [False, False]
    assert freezing == to_peer == to_eager == [False, True]
    Console(file=io.StringIO()).print(table)


def test_plot_omits_failed_contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    drawn = []
    monkeypatch.setattr(plot.plt, "close", drawn.append)
    unknown = [missing("dlrm", "eager"), measured("dlrm", "tvmify", 1.0)]
    write(tmp_path, [resnet(), Row(unknown)], {"processor": "a processor", "cores": 2}, 3)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n")
    ((axes,),) = (figure.axes for figure in drawn)
    titles = [CONTENDERS[name].title for name in ("freezing", "tvmify")]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == titles
    assert [text.get_text() for text in axes.get_yticklabels()] == ["resnet18"]


def test_without_matplotlib_there_are_numbers_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "benchmarks.plot", raising=False)
    write(tmp_path, [resnet()], {"processor": "a processor", "cores": 2}, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    results = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["results"]
    medians = {result["contender"]: result["median_ms"] for result in results}
    assert medians == {"eager": 10.0, "freezing": 4.0, "openvino": None, "tvmify": 2.0}


def test_models_are_chosen_by_name_and_pattern() -> None:
    assert chosen("mlp_*, resnet18", list(MODELS)) == ["resnet18", "mlp_1", "mlp_64"]
    with pytest.raises(ValueError, match="'resnet' is none of: resnet18"):
        chosen("resnet", list(MODELS))
