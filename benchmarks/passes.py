"""Contenders that run the same pass, each in its own process: with cold caches, then in turns."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.process import Worker, WorkerError


class Pass(NamedTuple):
    """The work that a contender repeats.

    Attributes
    ----------
    run
        Runs one pass.
    programs
        Returns the number of programs built for it so far; None for other compilers.
    """

    run: Callable[[], object]
    programs: Callable[[], int | None] = lambda: None


class Costs(NamedTuple):
    """The costs of a contender's passes.

    Attributes
    ----------
    first
        CPU seconds to build the model and run the first pass, child processes included.
    warm
        Median CPU seconds of the later passes.
    programs
        As in `Pass`.
    """

    first: float
    warm: float
    programs: int | None


def work(make: Callable[[], Pass]) -> None:
    """Run as a contender: the first pass, then one for each line of standard input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # compilers print to standard output

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    start = _cpu()
    made = make()
    made.run()
    answer(seconds=_cpu() - start, programs=made.programs())
    for _ in sys.stdin:
        before = time.process_time()
        made.run()
        answer(seconds=time.process_time() - before)


def main(
    module: str,
    models: Sequence[str],
    contenders: Sequence[str],
    make: Callable[[str, str, int], Pass],
    counted: tuple[str, int],
    describe: Callable[[int], str],
) -> None:
    """Run as the driver of a benchmark, or as one of its contenders, according to the arguments.

    Parameters
    ----------
    module
        The benchmark module, whose ``main`` calls this function.
    models
        The names of all models.
    make
        Returns the pass of a contender on a model; its last argument is the count.
    counted
        The name of the option for the count, and its default.
    describe
        Describes a pass, given the count.
    """
    if sys.argv[1:2] == ["work"]:
        _, _, name, model, count = sys.argv
        work(lambda: make(name, model, int(count)))
        return
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument(f"--{counted[0]}", type=int, default=counted[1], dest="count")
    parser.add_argument("--rounds", type=int, default=3, help="number of later passes")
    given = parser.parse_args()
    for model in given.models.split(","):
        print(f"\n{model}: {describe(given.count)}, CPU seconds", flush=True)
        compare(module, contenders, [model, str(given.count)], given.rounds)


def compare(module: str, contenders: Sequence[str], arguments: Sequence[str], rounds: int) -> None:
    """Run contenders, and print a line for each.

    Parameters
    ----------
    module
        The benchmark module. Its ``main`` takes ``work``, a contender and the arguments, and calls
        `work`.
    rounds
        The number of later passes of each contender.
    """
    print(f"{'':12} {'first pass':>11} {'warm pass':>11} {'programs':>9}", flush=True)
    for name, costs in _costs(module, contenders, arguments, rounds).items():
        programs = "" if costs.programs is None else costs.programs
        print(f"{name:12} {costs.first:11.1f} {costs.warm:11.2f} {programs:>9}", flush=True)


def _costs(
    module: str, contenders: Sequence[str], arguments: Sequence[str], rounds: int
) -> dict[str, Costs]:
    workers: dict[str, Worker] = {}
    first: dict[str, dict[str, Any]] = {}
    warm: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in contenders:
                command = [sys.executable, "-m", module, "work", name, *arguments]
                worker = Worker(command, Path(folder), name, threads=1)
                try:
                    first[name], warm[name] = worker.answer(), []
                    workers[name] = worker
                except WorkerError as error:
                    print(f"{name:12} {error}", flush=True)
                    worker.__exit__(None, None, None)
            for _ in range(rounds):
                for name, worker in workers.items():
                    warm[name].append(worker.burst()["seconds"])
        finally:
            for worker in workers.values():
                worker.__exit__(None, None, None)
    return {
        name: Costs(first[name]["seconds"], statistics.median(warm[name]), first[name]["programs"])
        for name in workers
    }


def _cpu() -> float:
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    usages = [resource.getrusage(kind) for kind in kinds]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
