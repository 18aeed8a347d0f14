"""The archive for a first run on a GPU, tested as far as possible without one."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu_bundle, gpu_first_run
from tests.compiler.gpu_programs import needs_nvcc

# Only PyTorch's packages are imported from elsewhere.
USE = """
import sys
folder, site = sys.argv[1:]
import torch
sys.meta_path = [one for one in sys.meta_path if "editable" not in getattr(one, "__name__", "")]
sys.path.insert(0, site)
import tvmify, tvm, cachetools
assert {module.__file__.startswith(site) for module in (tvmify, tvm, cachetools)} == {True}
loaded = tvmify.load(folder + "/mlp_1.pt")
(line,) = loaded._tvmify.explain()
assert "code for a GPU (sm_90a), and" in line, line
exported = torch.export.load(folder + "/mlp_1.pt2")
(x,) = exported.example_inputs[0]
assert torch.equal(exported.module()(x), loaded(x))
assert not any(name.startswith("tvmify.compiler") for name in sys.modules)
"""


@pytest.mark.thorough
@needs_nvcc
def test_archive_is_self_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TVMIFY_CACHE_DIR", str(tmp_path / "cache"))
    archive = tmp_path / "bundle.tar.xz"
    gpu_bundle.main(["--cases", "mlp_1", "--output", str(archive)])
    assert archive.stat().st_size < gpu_bundle.MOST_BYTES
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "gpu-bundle"
    assert (folder / "run.py").exists() and (folder / "gpu_timing.py").exists()
    command = [sys.executable, "-W", "ignore", "-c", USE, folder / "models", folder / "site"]
    subprocess.run(list(map(str, command)), check=True, timeout=120, cwd=tmp_path)


def test_weights_are_the_same_in_every_process_and_of_usual_sizes():
    first, second = (nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).eval() for _ in range(2))
    for net in (first, second):
        gpu_first_run.fill(net)
    x = torch.randn(8, 64)
    assert torch.equal(first(x), second(x))
    assert 0.5 < first(x).std() < 2


def test_differences_are_relative_and_nan_is_one():
    x = torch.tensor([1.0, -8.0])
    assert gpu_first_run.relative(x, x) == 0
    assert gpu_first_run.relative(x + 2, x) == pytest.approx(0.25)
    assert gpu_first_run.relative(x * float("nan"), x) > gpu_first_run.TOLERANCE
