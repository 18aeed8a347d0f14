"""tvmify on an NVIDIA GPU, against eager PyTorch and torch.compile.

    python -m benchmarks.gpu [--cases resnet50*] [--contenders eager,tvmify] [--together]

As in `benchmarks.run`, each contender has its own process, and they take turns. Results are
written after each case. A contender that fails or takes too long leaves a blank with the reason.
Contenders prepare one after the other, with the GPU to themselves. With ``--together`` they prepare
all at once, which is faster but disturbs those that time candidates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_timing import BURST
from benchmarks.gpu_worker import CASES, CONTENDERS, REFERENCE
from benchmarks.models import chosen
from benchmarks.process import Worker, WorkerError, take_turns
from benchmarks.results import Result

OURS, PEER, BASELINE = "tvmify", "max-autotune", "eager"
#: Goals: our time over the peer's; over eager's, for batches of one; our error over eager's.
TO_PEER, TO_EAGER, ERROR = 1.0, 0.6, 2.0


def main(arguments: list[str] | None = None) -> None:
    """Measure, write JSON after each case, print the table."""
    parser = argparse.ArgumentParser(description="tvmify and its peers on an NVIDIA GPU.")
    parser.add_argument("--cases", default="*", help="names or patterns (default: all)")
    parser.add_argument("--contenders", default="*", help="names or patterns (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="bursts per contender (default: 5)")
    parser.add_argument("--seconds", type=float, default=450, help="time limit (default: 450)")
    parser.add_argument("--together", action="store_true", help="all prepare at once")
    parser.add_argument("--output", type=Path, default=Path("build/bench/gpu.json"))
    given = parser.parse_args(arguments)
    try:
        names = chosen(given.cases, list(CASES))
        contenders = chosen(given.contenders, list(CONTENDERS))
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("There is no NVIDIA GPU here, or PyTorch is a build without CUDA.")
    console = Console(width=None if sys.stdout.isatty() else 140)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    measured: dict[str, dict[str, Result]] = {}
    end = time.monotonic() + given.seconds
    with ExitStack() as stack:
        comparisons = [Comparison(name, contenders, given.rounds, stack) for name in names]
        if given.together:
            get_ready(comparisons, [REFERENCE], end)
            get_ready(comparisons, contenders, end)
        for number, one in enumerate(comparisons):
            share = (end - time.monotonic()) / (len(names) - number)
            if not given.together:
                for contender in (REFERENCE, *contenders):
                    get_ready([one], [contender], time.monotonic() + share)
            measured[one.name] = one.measured()
            write(given.output, measured, machine, given.rounds)
            console.print(table({one.name: one.results}, machine))
            for result in filter(lambda result: result.reason, one.results.values()):
                console.print(f"{one.name}, {result.contender}: {result.reason}", markup=False)
    console.print(table(measured, machine))


def write(path: Path, measured: dict[str, dict[str, Result]], machine: str, rounds: int) -> None:
    """Write the results so far."""
    records = [result.record() for results in measured.values() for result in results.values()]
    record = {"machine": machine, "rounds": rounds, "results": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


class Comparison:
    """The contenders in one case, each in its own process; a failure's result is the reason.

    Parameters
    ----------
    name
        The name of the case.
    contenders
        Their names.
    rounds
        The number of bursts of each.
    stack
        Ends their processes.
    """

    def __init__(self, name: str, contenders: Sequence[str], rounds: int, stack: ExitStack) -> None:
        self.name = name
        self.results = {contender: Result(name, 0, contender) for contender in contenders}
        self._rounds = rounds
        self._stack = stack.enter_context(ExitStack())
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tvmify-gpu-"))
        self._starting: dict[str, Worker] = {}
        self._ready: dict[str, Worker] = {}

    def start(self, contender: str) -> None:
        """Start a contender's process; the reference starts first, and writes what others read."""
        if contender in self.results and self.results[contender].reason:
            return
        command = [sys.executable, "-m", "benchmarks.gpu_worker", self.name, contender]
        worker = Worker([*command, self._folder], Path(self._folder), contender)
        self._starting[contender] = self._stack.enter_context(worker)

    def wait(self, end: float) -> None:
        """Wait until the started contenders are ready, or until the clock reaches `end`."""
        end -= self._rounds * len(self.results) * 2 * BURST  # leave time to measure
        if (reference := self._starting.pop(REFERENCE, None)) is not None:
            try:
                reference.answer(end - time.monotonic())
            except WorkerError as error:
                for result in self.results.values():
                    result.reason = str(error)
        while self._starting:
            contender, worker = self._starting.popitem()
            result = self.results[contender]
            try:
                report = worker.answer(end - time.monotonic())
            except WorkerError as error:
                result.reason = str(error)
                continue
            result.first_call_s, result.error = report["first_call_s"], report["error"]
            self._ready[contender] = worker

    def measured(self) -> dict[str, Result]:
        """Measure the contenders that are ready, end all processes, and return the results."""
        with self._stack:
            take_turns(self._ready, self.results, self._rounds)
        return self.results


def get_ready(comparisons: Sequence[Comparison], contenders: Sequence[str], end: float) -> None:
    """Let contenders compile, in all cases at once, until the clock reaches `end`."""
    for one in comparisons:
        for contender in contenders:
            one.start(contender)
    for one in comparisons:
        one.wait(end)


def table(measured: dict[str, dict[str, Result]], machine: str) -> Table:
    """Return one row for each case: times, ratios and whether they meet the goals."""
    shown = Table(title=f"{machine}; milliseconds", title_justify="left", box=None)
    for title in ("", *CONTENDERS, "/ autotune", "/ eager", "first call s", "error / eager's"):
        shown.add_column(title, justify="right" if title else "left")
    for name, results in measured.items():
        ours, peer, baseline = (
            results.get(each, Result(name, 0, each)) for each in (OURS, PEER, BASELINE)
        )
        medians = [results[each].median_ms if each in results else None for each in CONTENDERS]
        to_eager = TO_EAGER if CASES[name].batch == 1 else None
        shown.add_row(
            name,
            *("" if median is None else f"{median:.3f}" for median in medians),
            _ratio(ours.median_ms, peer.median_ms, TO_PEER),
            _ratio(ours.median_ms, baseline.median_ms, to_eager),
            "" if ours.first_call_s is None else f"{ours.first_call_s:.1f}",
            _ratio(ours.error, baseline.error, ERROR),
        )
    return shown


def _ratio(ours: float | None, theirs: float | None, bound: float | None) -> str:
    if ours is None or theirs is None:
        return "not measured"
    ratio = ours / theirs if theirs else float(ours > 0)
    met = "" if bound is None else " met" if ratio <= bound else f" > {bound:.1f}"
    return f"{ratio:.2f}{met}"


if __name__ == "__main__":
    main()
