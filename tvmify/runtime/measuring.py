"""Timing artifacts side by side on the CPU, with torch's threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch

from tvmify.artifact import Artifact
from tvmify.runtime.executor import Executor, PackedWeights
from tvmify.runtime.graphs import GraphedCall
from tvmify.runtime.native import Call

#: Rounds in which each candidate has a turn; its fastest call counts, since noise only adds time.
_ROUNDS = 8
#: Seconds of one turn, and its fewest calls.
_TURN, _LEAST = 0.002, 2
#: Seconds that the clock resolves well enough. One timing should be short, so that it may fit
#: between two time slices of other processes.
_LEGIBLE = 20e-6
#: A candidate this many times slower than the fastest after two turns is dropped.
_HOPELESS = 3
#: Bytes of weights that evict the first of them from L1 and L2, and the most copies that are made:
#: small weights matter less.
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
        Programs that compute the same function of these inputs and weights.
    inputs, weights
        As for ``Executor.call`` and ``Executor.bind``. Inputs stay in the processor's caches
        between calls, if they fit. Weights do not: calls rotate through copies of them, since in a
        network other layers' weights are read in between.
    """
    turns = [cycle(copies(artifact, weights)[0]) for artifact in artifacts]
    leaves = tuple(inputs)
    best = [float("inf")] * len(turns)
    for done in range(_ROUNDS):
        # Two rounds for each, since the first may have been disturbed.
        limit = _HOPELESS * min(best) if done > 1 else float("inf")
        for i, calls in enumerate(turns):
            if best[i] <= limit:
                best[i] = min(best[i], _fastest(calls, leaves, best[i]))
    return best


def copies(
    artifact: Artifact, weights: Sequence[torch.Tensor], cold: int = _COLD
) -> tuple[list[Call | GraphedCall], list[torch.Tensor]]:
    """Return calls of an artifact with ``cold`` bytes of copies of the weights, and the copies."""
    executor = Executor(artifact)
    executor.bind(weights, store := PackedWeights())
    calls, held = [executor.call()], store.take(artifact.packed, lambda _: [])
    size = sum(tensor.nbytes for tensor in held)
    for _ in range(min(_MOST_COPIES, cold // size) if size else 0):
        other = executor.share()
        other.bind([weight.clone() for weight in weights], store := PackedWeights())
        calls.append(other.call())
        held += store.take(artifact.packed, lambda _: [])
    return calls, held


def _fastest(
    calls: Iterator[Call | GraphedCall], leaves: tuple[torch.Tensor, ...], expected: float
) -> float:
    """Return the seconds of the fastest call in one turn, averaged over a few if they are short."""
    batch = max(1, int(_LEGIBLE / expected))
    fastest, end, left = float("inf"), time.perf_counter() + _TURN, _LEAST
    while True:
        chosen = list(islice(calls, batch))
        begun = time.perf_counter()
        for call in chosen:
            call(leaves)
        now = time.perf_counter()
        fastest = min(fastest, (now - begun) / batch)
        left -= 1
        if now > end and left <= 0:
            return fastest
