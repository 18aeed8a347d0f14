"""The option ``tune="quick"``, from the decorator to the database on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tvmify import save, tvmify
from tvmify.compiler.cuda import nvcc
from tvmify.dispatch import work
from tvmify.runtime import measure_on
from tvmify.target import Target


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates each measurement compared."""
    counts: list[int] = []
    real = work.measure

    def counting(artifacts, inputs, weights):
        counts.append(len(artifacts))
        return real(artifacts, inputs, weights)

    monkeypatch.setattr(work, "measure", counting)
    return counts


def net(*after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), *after).eval()


def run(module: nn.Module, **options) -> str:
    fast = tvmify(tune="quick", strict=True, **options)(module)
    x = torch.randn(16, 64)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x))
    return str(fast.explain())


def test_known_workloads_are_not_measured_again(measured):
    assert "tuned: 1 workloads, 1 measured, 0 known before" in run(net())
    assert len(measured) == 1
    assert "tuned: 1 workloads, 0 measured, 1 known before" in run(net(nn.ReLU()))
    assert len(measured) == 1


def test_measurements_are_per_thread_count(measured):
    run(net())
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        run(net())
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 2


def test_no_measurements_without_tune(measured):
    fast = tvmify(strict=True)(net())
    with torch.no_grad():
        fast(torch.randn(16, 64))
    assert not measured
    assert "tuned" not in str(fast.explain())


@pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc here")
def test_cross_compiled_gpu_code_is_not_measured(measured, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(work, "measure_on", pytest.fail)
    fast = tvmify(tune="quick", strict=True)(nn.Linear(160, 128).eval())
    x = torch.randn(1, 160)
    save(fast, tmp_path / "net.pt", example_inputs=x, targets=[{"kind": "cuda", "arch": "sm_80"}])
    assert not measured


def test_gpu_candidates_are_timed_on_the_device():
    on_gpu = work._stopwatch(Target("cuda"), ())
    assert (on_gpu.func, on_gpu.args) == (measure_on, (torch.device("cuda"),))
    assert work._stopwatch(Target("llvm"), (torch.zeros(2),)) is work.measure
