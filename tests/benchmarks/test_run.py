"""The benchmark as a user starts it, on its smallest model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.thorough
def test_contenders_are_measured_and_a_missing_one_is_a_blank(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "openvino.py").write_text("raise ModuleNotFoundError('no openvino here')\n")
    command = [sys.executable, "-m", "benchmarks.run", "--models", "mlp_1", "--rounds", "2"]
    finished = subprocess.run(
        [*command, "--contenders", "eager openvino tvmify", "--output", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": f"{missing}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "mlp_1, OpenVINO: ModuleNotFoundError: no openvino here" in finished.stdout

    written = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    results = {result["contender"]: result for result in written["results"]}
    assert results["openvino"]["median_ms"] is None
    for name in ("eager", "tvmify"):
        result = results[name]
        assert len(result["bursts"]) == 2
        assert 0 < result["minimum_ms"] <= result["median_ms"]
        assert result["first_call_s"] > 0
        assert result["peak_mib"] > 50
        assert result["error"] < 2e-6
        assert result["remark"] == ""
