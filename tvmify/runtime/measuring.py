"""How long artifacts take, side by side, on the threads that torch uses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch

from tvmify.artifact import Artifact
from tvmify.runtime.executor import Executor, PackedWeights
from tvmify.runtime.graphs import GraphedCall
from tvmify.runtime.native import Call

#: The candidates take turns so often; the fastest call of each counts, as noise only ever adds.
_ROUNDS = 8
#: Seconds of one turn, and the calls that it has at least.
_TURN, _LEAST = 0.002, 2
#: Seconds that are long enough for the clock. What is measured at once is to be short: beside
#: another busy process, a call in between its slices of the processor is as fast as ever.
_LEGIBLE = 20e-6
#: What took so many times the fastest in its first two turns is out.
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
    turns = [cycle(copies(artifact, weights)[0]) for artifact in artifacts]
    leaves = tuple(inputs)
    best = [float("inf")] * len(turns)
    for done in range(_ROUNDS):
        # Two rounds for each: that it was disturbed in the first is no reason to give it up.
        limit = _HOPELESS * min(best) if done > 1 else float("inf")
        for i, calls in enumerate(turns):
            if best[i] <= limit:
                best[i] = min(best[i], _fastest(calls, leaves, best[i]))
    return best


def copies(
    artifact: Artifact, weights: Sequence[torch.Tensor], cold: int = _COLD
) -> tuple[list[Call | GraphedCall], list[torch.Tensor]]:
    """Return calls of an artifact with copies of the weights, of so many bytes; and the copies."""
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
    """Return the seconds of the fastest call in one turn, or of a few calls if they are short."""
    together = max(1, int(_LEGIBLE / expected))
    fastest, end, left = float("inf"), time.perf_counter() + _TURN, _LEAST
    while True:
        chosen = list(islice(calls, together))
        begun = time.perf_counter()
        for call in chosen:
            call(leaves)
        now = time.perf_counter()
        fastest = min(fastest, (now - begun) / together)
        left -= 1
        if now > end and left <= 0:
            return fastest
