from __future__ import annotations

import pytest

from benchmarks import heuristic


@pytest.mark.parametrize("shape", ["matmul 1x256 256x64", "2d 1x56x56x96 to 24"])
def test_a_shape_is_built_measured_and_reported(shape, tmp_path, monkeypatch, capsys):
    def run(step: str) -> str:
        arguments = ["heuristic", step, "--folder", str(tmp_path), "--only", shape]
        monkeypatch.setattr("sys.argv", arguments)
        heuristic.main()
        return capsys.readouterr().out

    assert "0 kernels are left" in run("build")
    assert "0 shapes are left" in run("measure")
    report = run("report")
    assert "of 1 within" in report
    assert "not measured" not in report


def test_a_lucky_visit_does_not_decide():
    lucky = {"own": 3.0, "other": 2.0}
    record = heuristic.Record([lucky, {"own": 2.0, "other": 2.2}, {"own": 4.0, "other": 4.4}])
    assert record.times("own") == {"own": 1.0, "other": pytest.approx(1.1)}
    assert record.lost("own") == 0


def test_candidates_are_known_once_they_were_measured_side_by_side():
    record = heuristic.Record([{"own": 1.0, "a": 1.0}, {"a": 3.0, "b": 2.0}])
    assert record.knows(["own", "a"])
    assert not record.knows(["own", "b"])
    assert "b" not in record.times("own")
