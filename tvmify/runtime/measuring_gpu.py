"""Timing artifacts side by side on a GPU: device time, without launch overhead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

import torch

from tvmify.artifact import Artifact
from tvmify.runtime.graphs import Captured, no_capture
from tvmify.runtime.measuring import copies

#: Rounds in which each candidate has a turn; its shortest time counts.
_ROUNDS = 5
#: The fewest calls in one graph, so that it runs longer than its launch.
_LEAST = 32
#: Replays of the graph that are timed together.
_REPLAYS = 4
#: Bytes of weights that evict the first of them from the GPU's L2.
_COLD = 256 << 20

Tensors = Sequence[torch.Tensor]


@contextlib.contextmanager
def timing_algorithms() -> Iterator[None]:
    """Let cuDNN time its algorithms for the convolutions that are first called in here.

    PyTorch remembers the fastest, for calls outside, too.
    """
    # What torch.backends.cudnn.benchmark does, which refuses where its flags are frozen.
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(True)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


def measure_on(
    gpu: torch.device, artifacts: Sequence[Artifact], inputs: Tensors, weights: Tensors
) -> list[float]:
    """Return the seconds of one call of each artifact on a GPU; see `tvmify.runtime.measure`."""
    with torch.cuda.device(gpu), torch.no_grad(), timing_algorithms():
        leaves = [tensor.to(gpu) for tensor in inputs]
        held = [tensor.to(gpu) for tensor in weights]
        rounds = [_round(artifact, leaves, held) for artifact in artifacts]
        best = [float("inf")] * len(rounds)
        for _ in range(_ROUNDS):
            best = [min(known, seconds()) for known, seconds in zip(best, rounds, strict=True)]
        return best


def _round(artifact: Artifact, inputs: Tensors, weights: Tensors) -> Callable[[], float]:
    """Return a function that measures the time of one call, averaged over a CUDA graph of many."""
    calls, packed = copies(artifact, weights, _COLD)
    count = max(_LEAST, len(calls))

    def run(given: Tensors) -> list[torch.Tensor]:
        return [call(tuple(given)) for call in islice(cycle(calls), count)][-1:]

    with no_capture(artifact):
        graph = Captured(run, inputs, packed)

    def seconds() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph(inputs)  # keeps the GPU busy while the timed ones are launched
        begin.record()
        for _ in range(_REPLAYS):
            graph(inputs)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (_REPLAYS * count)

    return seconds
