"""tvmify on an NVIDIA GPU, against eager PyTorch and torch.compile.

    python -m benchmarks.gpu [--cases resnet50*] [--rounds 5]

As `benchmarks.run`: each contender is a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_worker import CASES, CONTENDERS
from benchmarks.models import chosen
from benchmarks.process import Worker, WorkerError, take_turns
from benchmarks.results import Result

OURS, PEER, BASELINE = "tvmify", "max-autotune", "eager"
#: Our time over the peer's and, where a batch is one example, over eager's; our error over eager's.
TO_PEER, TO_EAGER, ERROR = 1.0, 0.6, 2.0


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description="tvmify and its peers on an NVIDIA GPU.")
    parser.add_argument("--cases", default="*", help="names or patterns (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each (default: 5)")
    parser.add_argument("--output", type=Path, default=Path("build/bench/gpu.json"))
    given = parser.parse_args(arguments)
    try:
        names = chosen(given.cases, list(CASES))
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("There is no NVIDIA GPU here, or PyTorch is a build without CUDA.")
    measured = {name: compare(name, given.rounds) for name in names}
    console = Console(width=None if sys.stdout.isatty() else 140)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    console.print(table(measured, machine))
    for name, results in measured.items():
        for result in filter(lambda result: result.reason, results.values()):
            console.print(f"{name}, {result.contender}: {result.reason}", markup=False)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    records = [result.record() for results in measured.values() for result in results.values()]
    record = {"machine": machine, "rounds": given.rounds, "results": records}
    given.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def compare(name: str, rounds: int) -> dict[str, Result]:
    """Return the results of all contenders in one case."""
    results = {contender: Result(name, 0, contender) for contender in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="tvmify-gpu-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        command = [sys.executable, "-m", "benchmarks.gpu_worker", name]
        subprocess.run([*command, "reference", scratch], check=True)
        workers: dict[str, Worker] = {}
        for contender, result in results.items():
            worker = Worker([*command, contender, scratch], folder, contender)
            worker = stack.enter_context(worker)
            try:
                report = worker.answer()
            except WorkerError as error:
                result.reason = str(error)
                continue
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
        ours, baseline = results[OURS], results[BASELINE]
        to_eager = TO_EAGER if CASES[name].batch == 1 else None
        shown.add_row(
            name,
            *("" if r.median_ms is None else f"{r.median_ms:.3f}" for r in results.values()),
            _ratio(ours.median_ms, results[PEER].median_ms, TO_PEER),
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
