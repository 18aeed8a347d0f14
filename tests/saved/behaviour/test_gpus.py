"""Files with code for the CPU and for GPUs, on machines without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tvmify
from tvmify.compiler.cuda import nvcc

pytestmark = [
    pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU"),
]

TARGETS = [{"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90a"}, None]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network for two kinds of GPUs and for this CPU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("TVMIFY_CACHE_DIR", str(path.parent / "cache"))
        tvmify.save(net, path, example_inputs=torch.ones(1, 3, 8, 8), targets=TARGETS)
    torch.save(net, path.with_suffix(".original"))
    return path


def test_the_code_for_the_cpu_serves(file: Path):
    loaded = tvmify.load(file, strict=True)
    net = torch.load(file.with_suffix(".original"), weights_only=False)
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-5, atol=1e-5)


def test_file_reports_its_targets_and_unused_code(file: Path):
    lines = tvmify.load(file)._tvmify.explain()
    assert [line.endswith(": compiled") for line in lines] == [False, False, True]
    assert "code for a GPU (sm_90a), and" in lines[0] and "(sm_80), and" in lines[1]  # newest first
    signatures = tvmify.inspect(file)["signatures"]
    assert [s["needs"][-1] for s in signatures][:2] == ["cuda:sm_90a", "cuda:sm_80"]
    assert [s["target"]["kind"] for s in signatures] == ["cuda", "cuda", "llvm"]
    assert json.dumps(signatures)


def test_gpu_only_file_runs_uncompiled_on_cpu(tmp_path: Path):
    net = nn.Linear(4, 2).eval()
    tvmify.save(net, tmp_path / "m.pt", example_inputs=torch.ones(1, 4), targets=TARGETS[:2])
    loaded = tvmify.load(tmp_path / "m.pt")
    x = torch.randn(1, 4)
    with torch.no_grad(), pytest.warns(UserWarning, match="sm_80, and the tensors are on cpu"):
        torch.testing.assert_close(loaded(x), net(x))
