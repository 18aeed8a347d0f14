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
