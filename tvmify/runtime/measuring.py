"""How long artifacts take, side by side, on the threads that torch uses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch

from tvmify.artifact import Artifact
from tvmify.runtime.executor import Executor, PackedWeights
from tvmify.runtime.native import Call

#: The candidates take turns so often; the fastest turn of each counts, as noise only ever adds.
_ROUNDS = 8
#: Seconds of one turn. A kernel that takes longer runs once in it.
_TURN = 0.002
#: What took so many times the fastest in its first turn is out.
_HOPELESS = 3
#: Bytes of weights after which the first are no longer in a private cache, and the most copies
#: that are made: small weights matter less.
_COLD, _MOST_COPIES = 16 << 20, 64


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
        As ``Executor.call`` and ``Executor.bind`` take them. Inputs stay in the caches of the
        processor between calls, as far as they fit. Weights do not, as in a network, where those
        of other layers are read in between: copies of them take turns.
    """
    turns = [_turns(artifact, weights) for artifact in artifacts]
    leaves = tuple(inputs)
    best = []
    repeats = []
    for calls in turns:
        _seconds(calls, leaves, 2)  # touches the memory of its results for the first time
        best.append(_seconds(calls, leaves, 2))
        repeats.append(max(1, min(1000, int(_TURN / best[-1]))))
    for _ in range(_ROUNDS):
        limit = _HOPELESS * min(best)
        for i, calls in enumerate(turns):
            if best[i] <= limit:
                best[i] = min(best[i], _seconds(calls, leaves, repeats[i]))
    return best


def _turns(artifact: Artifact, weights: Sequence[torch.Tensor]) -> Iterator[Call]:
    """Return calls of an artifact, one after the other with copies of the weights."""
    executor, packed = Executor(artifact), PackedWeights()
    executor.bind(weights, packed)
    calls = [executor.call()]
    if artifact.packed:
        tensors = packed.take(artifact.packed, list)
        size = sum(tensor.nbytes for tensor in tensors)
        for _ in range(min(_MOST_COPIES, _COLD // size)):
            other = executor.share()
            other.compiled.bind([tensor.clone() for tensor in tensors])
            calls.append(other.call())
    return cycle(calls)


def _seconds(calls: Iterator[Call], leaves: tuple[torch.Tensor, ...], repeats: int) -> float:
    chosen = list(islice(calls, repeats))
    begun = time.perf_counter()
    for call in chosen:
        call(leaves)
    return (time.perf_counter() - begun) / repeats
