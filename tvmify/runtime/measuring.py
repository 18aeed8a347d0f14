"""How long artifacts take, side by side, on the threads that torch uses."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tvmify.artifact import Artifact
from tvmify.runtime.executor import Executor, PackedWeights

#: The candidates take turns so often; the fastest turn of each counts, as noise only ever adds.
_ROUNDS = 8
#: Seconds of one turn. A kernel that takes longer runs once in it.
_TURN = 0.002
#: What took so many times the fastest in its first turn is out.
_HOPELESS = 3


def measure(
    artifacts: Sequence[Artifact],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[float]:
    """Return the seconds of one call of each artifact.

    Parameters
    ----------
    artifacts
        Programs that compute the same, all of these inputs and weights.
    inputs, weights
        As ``Executor.call`` and ``Executor.bind`` take them. They stay in the caches of the
        processor between calls, as far as they fit.
    """
    calls = []
    for artifact in artifacts:
        executor = Executor(artifact)
        executor.bind(weights, PackedWeights())
        calls.append(executor.call())
    leaves = tuple(inputs)
    for call in calls:
        call(leaves)  # touches the memory of its results for the first time
    best = []
    repeats = []
    for call in calls:
        best.append(_seconds(call, leaves, 1))
        repeats.append(max(1, min(1000, int(_TURN / best[-1]))))
    for _ in range(_ROUNDS):
        limit = _HOPELESS * min(best)
        for i, call in enumerate(calls):
            if best[i] <= limit:
                best[i] = min(best[i], _seconds(call, leaves, repeats[i]))
    return best


def _seconds(call: object, leaves: tuple[torch.Tensor, ...], repeats: int) -> float:
    begun = time.perf_counter()
    for _ in range(repeats):
        call(leaves)  # type: ignore[operator]
    return (time.perf_counter() - begun) / repeats
