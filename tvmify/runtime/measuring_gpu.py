"""How long artifacts take on a GPU, side by side: its own time, without that of launching them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import torch

from tvmify.artifact import Artifact
from tvmify.runtime.graphs import Captured, no_capture
from tvmify.runtime.measuring import copies

#: The candidates take turns so often; the shortest time of each counts.
_ROUNDS = 5
#: Calls that are one graph, at least: more than it takes the processor to launch it.
_LEAST = 32
#: Replays of it that are timed together.
_REPLAYS = 4
#: Bytes of weights after which the first are no longer in the GPU's cache.
_COLD = 256 << 20

Tensors = Sequence[torch.Tensor]


def measure_on(
    gpu: torch.device, artifacts: Sequence[Artifact], inputs: Tensors, weights: Tensors
) -> list[float]:
    """Return the seconds of one call of each artifact on a GPU; see `tvmify.runtime.measure`."""
    with torch.cuda.device(gpu), torch.no_grad():
        leaves = [tensor.to(gpu) for tensor in inputs]
        held = [tensor.to(gpu) for tensor in weights]
        rounds = [_round(artifact, leaves, held) for artifact in artifacts]
        best = [float("inf")] * len(rounds)
        for _ in range(_ROUNDS):
            best = [min(known, seconds()) for known, seconds in zip(best, rounds, strict=True)]
        return best


def _round(artifact: Artifact, inputs: Tensors, weights: Tensors) -> Callable[[], float]:
    """Return what measures one call, among many in a CUDA graph."""
    calls, packed = copies(artifact, weights, _COLD)
    count = max(_LEAST, len(calls))

    def run(given: Tensors) -> list[torch.Tensor]:
        return [call(tuple(given)) for call in islice(cycle(calls), count)][-1:]

    with no_capture(artifact):
        graph = Captured(run, inputs, packed)

    def seconds() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph(inputs)  # while it runs, the next ones are launched
        begin.record()
        for _ in range(_REPLAYS):
            graph(inputs)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (_REPLAYS * count)

    return seconds
