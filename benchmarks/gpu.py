"""tvmify on an NVIDIA GPU, against eager PyTorch and torch.compile.

    python -m benchmarks.gpu [--cases resnet50*] [--contenders eager,tvmify] [--rounds 5]

As `benchmarks.run`: each contender is a process of its own, and they take turns. Results are
written after each case, and what fails or takes too long is a blank with its reason.
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
#: Our time over the peer's and, where a batch is one example, over eager's; our error over eager's.
TO_PEER, TO_EAGER, ERROR = 1.0, 0.6, 2.0


def main(arguments: list[str] | None = None) -> None:
    """Measure, write JSON after each case, print the table."""
    parser = argparse.ArgumentParser(description="tvmify and its peers on an NVIDIA GPU.")
    parser.add_argument("--cases", default="*", help="names or patterns (default: all)")
    parser.add_argument("--contenders", default="*", help="names or patterns (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each (default: 5)")
    parser.add_argument("--seconds", type=float, default=450, help="for all of it (default: 450)")
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
    for number, name in enumerate(names):
        share = (end - time.monotonic()) / (len(names) - number)
        measured[name] = compare(name, contenders, given.rounds, share)
        write(given.output, measured, machine, given.rounds)
        console.print(table({name: measured[name]}, machine))
        for result in filter(lambda result: result.reason, measured[name].values()):
            console.print(f"{name}, {result.contender}: {result.reason}", markup=False)
    console.print(table(measured, machine))


def write(path: Path, measured: dict[str, dict[str, Result]], machine: str, rounds: int) -> None:
    """Write what was measured so far."""
    records = [result.record() for results in measured.values() for result in results.values()]
    record = {"machine": machine, "rounds": rounds, "results": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def compare(name: str, contenders: Sequence[str], rounds: int, seconds: float) -> dict[str, Result]:
    """Return the results of contenders in one case; one that fails has a reason instead.

    Parameters
    ----------
    name
        Of the case.
    contenders
        Their names.
    rounds
        How many bursts each has.
    seconds
        What all of it may take: a contender that is not ready in time is left out.
    """
    results = {contender: Result(name, 0, contender) for contender in contenders}
    ready_by = time.monotonic() + seconds - rounds * len(contenders) * 2 * BURST
    with tempfile.TemporaryDirectory(prefix="tvmify-gpu-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        command = [sys.executable, "-m", "benchmarks.gpu_worker", name]
        workers: dict[str, Worker] = {}
        for contender in (REFERENCE, *contenders):
            worker = Worker([*command, contender, scratch], folder, contender)
            worker = stack.enter_context(worker)
            try:
                report = worker.answer(ready_by - time.monotonic())
            except WorkerError as error:
                failed = contenders if contender == REFERENCE else [contender]
                for one in failed:
                    results[one].reason = str(error)
                if contender == REFERENCE:
                    break
                continue
            if contender != REFERENCE:
                result = results[contender]
                result.first_call_s, result.error = report["first_call_s"], report["error"]
                workers[contender] = worker
        take_turns(workers, results, rounds)
    return results


def table(measured: dict[str, dict[str, Result]], machine: str) -> Table:
    """Return one row for each case: times, ratios and whether they are what was promised."""
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
