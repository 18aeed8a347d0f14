"""Times compiled code against eager PyTorch on the inputs of a call."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from tvmify.artifact import Seconds, VerdictKey
from tvmify.errors import EagerRaises
from tvmify.torch_compat.silence import silenced

#: Seconds that a comparison may take once both sides are warm, and its most rounds. It takes the
#: longer time if eager seems faster, for which other load on the machine is the usual cause.
_BRIEF, _LONGER, _MOST_ROUNDS = 0.1, 2.0, 100
#: If the first calls of both sides take more seconds than this, they are not repeated. Not less: on
#: a loaded machine first calls take 20 times as long, and their ratio means nothing.
_LONG = 3.0
#: Consecutive calls of a side, so that it finds the processor's caches as it left them.
_BURST = 3


class Verdict(NamedTuple):
    """The shortest time of a call on each side in seconds, and the number of threads."""

    compiled: float
    eager: float
    threads: int

    @property
    def is_for_compiled(self) -> bool:
        """Whether compiled code is at least as fast."""
        return self.compiled <= self.eager

    def __str__(self) -> str:
        compiled, eager = _milliseconds(self.compiled), _milliseconds(self.eager)
        return f"{compiled} compiled, {eager} in eager, {self.threads} threads"


def judge(
    verdicts: dict[VerdictKey, Seconds],
    compiled: Callable[[], Any],
    eager: Callable[[], Any],
    gpu: int | None = None,
    *,
    graphs: bool = False,
) -> Verdict | None:
    """Return the verdict for the current number of threads.

    Parameters
    ----------
    verdicts
        ``Artifact.verdicts``. If there is no verdict yet, both sides are timed, and it is added.
    compiled, eager
        Compute the call.
    gpu
        The index of the GPU that they use, which each timed call waits for; None for the CPU.
    graphs
        Whether compiled code runs as CUDA graphs, which have verdicts of their own.

    Returns
    -------
    Verdict or None
        None if compiled code raises, which it does again when the call runs; or if eager PyTorch
        lacks the memory to run beside it.

    Raises
    ------
    EagerRaises
        Eager PyTorch raises.
    """
    key = VerdictKey(torch.get_num_threads(), graphs)
    if key not in verdicts:
        try:
            with torch.random.fork_rng(devices=[] if gpu is None else [gpu]):
                # restores the state of the generators
                verdicts[key] = compare(_whole(compiled, gpu), _whole(_told(eager), gpu))
        except EagerRaises:
            raise
        except Exception:  # of any kind: the forward of a user ran
            return None
    return Verdict(*verdicts[key], key.threads)


def _told(eager: Callable[[], Any]) -> Callable[[], Any]:
    """Tell an error of eager PyTorch from one of compiled code."""

    def call() -> None:
        try:
            eager()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of any kind: the forward of a user ran
            raise EagerRaises(error) from error

    return call


def _whole(call: Callable[[], Any], gpu: int | None) -> Callable[[], Any]:
    if gpu is None:
        return call

    def call_and_wait() -> None:
        call()
        # Not the whole GPU, which would invalidate a graph that another thread captures.
        torch.cuda.current_stream(gpu).synchronize()

    return call_and_wait


def compare(compiled: Callable[[], Any], eager: Callable[[], Any]) -> Seconds:
    """Time two ways to compute a call in turns, and return the shortest time of each.

    They may draw random numbers, but have no other side effects. The shortest times count, because
    other load on the machine can only add to them.
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
