"""Compiled code against eager PyTorch, on the inputs of a real call: the loser is not used."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from tvmify.artifact import Seconds
from tvmify.torch_compat.silence import silenced

#: Seconds that a comparison may take once both sides are warm, and its most rounds. That eager is
#: faster would be a surprise, which other work on the machine explains more often than not: then
#: the comparison goes on for the longer time.
_BRIEF, _LONGER, _MOST_ROUNDS = 0.1, 2.0, 100
#: Seconds of the first call of both sides from which on they are not repeated: patience is short.
#: Not less: on a loaded machine first calls take 20 times as long, and their order says nothing.
_LONG = 3.0
#: Calls in a row, so that each side finds the processor's caches as its own last call left them.
_BURST = 3


class Verdict(NamedTuple):
    """The shortest time of a call on each side, in seconds, with so many threads."""

    compiled: float
    eager: float
    threads: int

    @property
    def is_for_compiled(self) -> bool:
        """Whether compiled code is no slower."""
        return self.compiled <= self.eager

    def __str__(self) -> str:
        compiled, eager = _milliseconds(self.compiled), _milliseconds(self.eager)
        return f"{compiled} compiled, {eager} in eager, {self.threads} threads"


def judge(
    verdicts: dict[str, Seconds],
    compiled: Callable[[], Any],
    eager: Callable[[], Any],
    gpu: int | None = None,
    how: str = "",
) -> Verdict | None:
    """Return the verdict for the current number of threads.

    Parameters
    ----------
    verdicts
        ``Artifact.verdicts``. If the verdict is not among them, both sides are timed, and it is
        added.
    compiled, eager
        Compute the call.
    gpu
        The index of that which they use, until which is done a call is not over; None for the CPU.
    how
        Tells ways to run compiled code apart, which have verdicts of their own.

    Returns
    -------
    Verdict or None
        None if a side raises: the call itself will raise again, when it is run.
    """
    threads = torch.get_num_threads()
    place = f"{threads} {how}".rstrip()
    if place not in verdicts:
        try:
            with torch.random.fork_rng(devices=[] if gpu is None else [gpu]):
                # what is drawn here, nobody was given
                verdicts[place] = compare(_whole(compiled, gpu), _whole(eager, gpu))
        except Exception:  # of any kind: the forward of a user ran
            return None
    return Verdict(*verdicts[place], threads)


def _whole(call: Callable[[], Any], gpu: int | None) -> Callable[[], Any]:
    if gpu is None:
        return call

    def call_and_wait() -> None:
        call()
        # Not for the whole GPU, which would spoil a graph that another thread captures.
        torch.cuda.current_stream(gpu).synchronize()

    return call_and_wait


def compare(compiled: Callable[[], Any], eager: Callable[[], Any]) -> Seconds:
    """Time two ways to compute a call, in turns; return the shortest seconds of each.

    Both may draw random numbers, and have to be free of other effects, as all that is compiled is.
    The shortest times count: what else the machine does can only add to them.
    """
    with torch.no_grad():
        best = Seconds(_time(compiled), _time(eager))
        if sum(best) > _LONG:
            return best
        start = perf_counter()
        with silenced():  # what forward warns of has been shown
            for _ in range(_MOST_ROUNDS):
                best = Seconds(
                    min(best.compiled, *(_time(compiled) for _ in range(_BURST))),
                    min(best.eager, *(_time(eager) for _ in range(_BURST))),
                )
                if perf_counter() - start > (_BRIEF if best.compiled <= best.eager else _LONGER):
                    break
        return best


def _time(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
