"""Timing on a GPU, with fakes of its graphs and its clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.runtime import programs
from tvmify.runtime import measure_on, measuring_gpu

HERE = torch.device("cpu")


class Gpu:
    """A fake GPU whose replays take given times, in turns for each graph; some are disturbed."""

    def __init__(self, *milliseconds: list[float]) -> None:
        self.milliseconds = milliseconds
        self.now = 0.0
        self.graphs: list[Captured] = []


class Captured:
    gpu: Gpu

    def __init__(
        self,
        run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> None:
        self.results, self.kept = run(inputs), kept
        self.times = self.gpu.milliseconds[len(self.gpu.graphs)]
        self.replays = 0
        self.gpu.graphs.append(self)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.gpu.now += self.times[self.replays % len(self.times)]
        self.replays += 1


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    def make(*milliseconds: list[float]) -> Gpu:
        gpu = Gpu(*milliseconds)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(Captured, "gpu", gpu, raising=False)
        monkeypatch.setattr(measuring_gpu, "Captured", Captured)
        return gpu

    return make


def test_the_shortest_time_of_many_calls_counts(on_gpu: Callable[..., Gpu]):
    # Each round has five replays, of which the first is not timed.
    gpu = on_gpu([100, 64, 64, 64, 64, 100, 64, 96, 64, 64], [320.0])
    x = torch.randn(4, 16)
    seconds = measure_on(HERE, [programs.added(), programs.squared()], [x], [])
    assert seconds == pytest.approx([0.002, 0.01])
    added, squared = (graph.results for graph in gpu.graphs)
    assert torch.equal(added[0], x + x) and torch.equal(squared[0], x * x)


def test_weights_take_turns_and_stay_as_long_as_their_graph(
    on_gpu: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
):
    weights = [torch.ones(8, 16), torch.ones(8)]
    monkeypatch.setattr(measuring_gpu, "_COLD", 40 * 4 * (8 * 16 + 8))
    gpu = on_gpu([41.0])
    (seconds,) = measure_on(HERE, [programs.linear()], [torch.ones(4, 16)], weights)
    assert seconds == pytest.approx(0.001)  # per call, of 41
    (graph,) = gpu.graphs
    assert len({tensor.data_ptr() for tensor in graph.kept}) == len(graph.kept) == 41 * 2
    assert torch.equal(graph.results[0], torch.full((4, 8), 17.0))
