"""Tuning: the candidates of each workload are built and timed, once per processor. A workload (an
operator with its shapes, or a fused function) that is in the database costs nothing. The others are
built as separate programs in parallel, those with the most work first; then all candidates of one
workload are timed interleaved, with nothing else running. Each result is recorded immediately, so
that an interrupt or the time limit loses only unfinished work; workloads that were not reached use
the rules' choice.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tvmify.compiler.messages import first_line
from tvmify.system.stack import large_stacks

if TYPE_CHECKING:
    import torch
    import tvm

    from tvmify.artifact import Artifact
    from tvmify.compiler.kernels.common.choice import Choices
    from tvmify.compiler.kernels.common.sample import Sample

#: Seconds for measurements: no workload is begun that would end later, if it took as long as the
#: longest so far.
LIMIT = 20.0
#: A winner may ask for choices of its own, which are measured in a second pass.
_PASSES = 2


class Database(Protocol):
    """A store of times, see `tvmify.cache.Measurements`."""

    def best(self, workload: str, candidates: Sequence[str]) -> str | None:
        """Return the fastest candidate, or None if it is not known."""
        ...

    def record(self, workload: str, seconds: Mapping[str, float]) -> None:
        """Record the times of candidates."""
        ...


@dataclass(frozen=True)
class Tuning:
    """The parameters of tuning.

    Attributes
    ----------
    measure
        Called with artifacts, inputs and weights; returns the seconds that each artifact takes.
    database
        Shared by all programs for one processor.
    on_progress
        Called with the number of workloads that are settled, and of all.
    limit
        Seconds, see `LIMIT`.
    """

    measure: Callable[
        [Sequence[Artifact], Sequence[torch.Tensor], Sequence[torch.Tensor]], list[float]
    ]
    database: Database
    on_progress: Callable[[int, int], object] = lambda done, total: None
    limit: float = LIMIT


@dataclass
class Tuned:
    """The results of tuning.

    Attributes
    ----------
    winners
        For each settled workload the name of its fastest candidate.
    measured, left
        How many workloads were measured now, and how many were left when time ran out.
    changed
        The winners that are not the rule's choice.
    failed
        For each workload that could not be built or run by itself, why.
    """

    winners: dict[str, str] = field(default_factory=dict)
    measured: int = 0
    left: int = 0
    changed: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def settle(self, workload: str, candidates: Sequence[str], winner: str) -> None:
        """Record a winner."""
        self.winners[workload] = winner
        if winner != candidates[0]:
            self.changed[workload] = winner

    def report(self) -> dict[str, Any]:
        """Return what ``explain()`` says of it."""
        return {
            "workloads": len(self.winners) + self.left,
            "measured": self.measured,
            "left": self.left,
            "changed": self.changed,
            "failed": self.failed,
        }


def tune(
    ir_mod: tvm.IRModule, target: tvm.target.Target, choices: Choices, tuning: Tuning
) -> Tuned:
    """Find the fastest candidate for each workload of an imported program."""
    from tvmify.compiler.tune.samples import collect

    deadline = time.monotonic() + tuning.limit
    tuned = Tuned()
    for _ in range(_PASSES):
        choices = dataclasses.replace(choices, measured=tuned.winners)
        collected = collect(ir_mod, target, choices)
        samples = collected.samples
        unknown = []
        for workload in sorted(samples, key=lambda name: -samples[name].work):
            candidates = collected.candidates[workload]
            if workload in tuned.winners:
                continue
            only = candidates[0] if len(candidates) == 1 else None
            best = only or tuning.database.best(workload, candidates)
            if best is not None:
                tuned.settle(workload, candidates, best)
            else:
                unknown.append(workload)
        if not unknown:
            break
        # Only as many at a time as keep all cores busy while their candidates are built, since
        # nobody knows how long the first ones take.
        step = max(1, (os.cpu_count() or 1) // choices.most)
        longest = 0.0
        for start in range(0, len(unknown), step):
            tuning.on_progress(len(tuned.winners), len(samples))
            begun = time.monotonic()
            if begun + longest > deadline:
                break
            batch = [
                _Workload(w, collected.candidates[w], samples[w])
                for w in unknown[start : start + step]
            ]
            _measure(batch, target, choices, tuning, tuned, deadline)
            longest = max(longest, time.monotonic() - begun)
        tuned.left = sum(workload not in tuned.winners for workload in unknown)
        if tuned.left:
            break
    return tuned


@dataclass(frozen=True)
class _Workload:
    name: str
    candidates: list[str]
    sample: Sample


def _measure(
    batch: list[_Workload],
    target: tvm.target.Target,
    choices: Choices,
    tuning: Tuning,
    tuned: Tuned,
    deadline: float,
) -> None:
    built = _build(batch, target, choices, tuned.winners)
    for workload, results in zip(batch, built, strict=True):
        if time.monotonic() > deadline:
            return
        try:
            seconds = _time(workload, results, tuning)
        except Exception as error:  # TVM's share no narrower class; a GPU may be full
            # No reason to give up the program: it may build, and run, there.
            tuned.failed[workload.name] = first_line(error)
            tuned.settle(workload.name, workload.candidates, workload.candidates[0])
            continue
        tuning.database.record(workload.name, seconds)
        tuned.measured += 1
        best = tuning.database.best(workload.name, workload.candidates)
        tuned.settle(workload.name, workload.candidates, best or workload.candidates[0])


def _time(
    workload: _Workload, results: list[Artifact | Exception], tuning: Tuning
) -> dict[str, float]:
    """Return the seconds of each candidate; infinity for one that cannot be built."""
    if isinstance(results[0], Exception):
        raise results[0]  # there is nothing to compare with
    inputs, weights = workload.sample.tensors()
    able = [result for result in results if not isinstance(result, Exception)]
    times = iter(tuning.measure(able, inputs, weights))
    return {
        name: math.inf if isinstance(result, Exception) else next(times)
        for name, result in zip(workload.candidates, results, strict=True)
    }


def _build(
    batch: list[_Workload],
    target: tvm.target.Target,
    choices: Choices,
    winners: Mapping[str, str],
) -> list[list[Artifact | Exception]]:
    """Build every candidate of some workloads; an error for one that cannot be built."""
    from tvmify.compiler.tune.samples import lower_sample

    def begun(workload: _Workload, name: str) -> Future[Artifact]:
        measured = {**winners, workload.name: name}
        forced = dataclasses.replace(choices, measured=measured)
        try:
            return pool.submit(lower_sample(workload.sample, target, forced))
        except Exception as error:  # TVM's errors share no narrower class
            failed: Future[Artifact] = Future()
            failed.set_exception(error)
            return failed

    def ended(future: Future[Artifact]) -> Artifact | Exception:
        try:
            return future.result()
        except Exception as error:
            return error

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        # Only this thread may lower; the others build.
        with large_stacks():
            futures = [[begun(work, name) for name in work.candidates] for work in batch]
        return [[ended(future) for future in row] for row in futures]
    finally:
        # After an interrupt, builds that have not begun are dropped.
        pool.shutdown(wait=False, cancel_futures=True)
