"""tvmify against other ways to run a PyTorch module on a CPU.

    python -m benchmarks.run [--models resnet18,mlp*] [--contenders …] [--rounds 7] [--threads 2]
        [--dtype bfloat16]

Each contender has its own process. They take turns, one burst of calls at a time, so that noise on
the machine affects all of them alike. The others are stopped meanwhile (SIGSTOP), since many
runtimes keep their threads spinning after a call.

Results are written after each model. An interrupted run continues from there when it is started
again with the same arguments, commit, machine and packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.contenders import CONTENDERS
from benchmarks.goals import goals
from benchmarks.models import DTYPES, MODELS, chosen, in_dtype
from benchmarks.process import Worker, WorkerError, take_turns
from benchmarks.results import Result, Row, rows
from benchmarks.table import show
from benchmarks.unfinished import Unfinished, commit

ONNX_READERS = {"openvino", "onnxruntime"}
GOALS_THREADS = 2
PACKAGES = "torch apache-tvm onnxruntime openvino transformers".split()


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, and write JSON and a plot."""
    parser = argparse.ArgumentParser(description="tvmify against its peers.")
    parser.add_argument("--models", default="*", help="names or patterns (default: all)")
    parser.add_argument("--contenders", default="*", help="names or patterns (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="bursts per contender (default: 7)")
    parser.add_argument("--threads", default="2", help="numbers of threads (default: 2)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights and inputs")
    parser.add_argument("--caches", type=Path, help="keep compiled code in this folder")
    parser.add_argument("--output", type=Path, default=Path("build/bench"), metavar="FOLDER")
    given = parser.parse_args(arguments)
    try:
        models = [in_dtype(name, given.dtype) for name in chosen(given.models, list(MODELS))]
        names = chosen(given.contenders, list(CONTENDERS))
    except ValueError as error:
        parser.error(str(error))
    threads = [int(number) for number in given.threads.replace(",", " ").split()]
    # Without a handler, SIGTERM would leave stopped processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))

    machine = describe_machine()
    settings = {"machine": machine, "commit": commit(), "rounds": given.rounds, "contenders": names}
    unfinished = Unfinished(given.output / "unfinished.json", settings)
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        whole = progress.add_task(
            "", total=len(models) * len(threads) * (len(names) + given.rounds)
        )
        for count in threads:
            for model in models:
                if found := unfinished.of(model, count):
                    progress.console.print(f"{model}, {count} threads: measured before")
                    progress.advance(whole, len(names) + given.rounds)
                else:
                    with _caches(given.caches, model, count) as folder:
                        step = _Steps(progress, whole, f"{model}, {count} threads")
                        found = compare(model, names, count, given.rounds, folder, step)
                    unfinished.add(found)
                results += found
    grouped = rows(results)
    held = goals([row for row in grouped if row.threads == GOALS_THREADS])
    console = Console(width=None if sys.stdout.isatty() else 160)
    show(console, grouped, held, f"{machine['processor']}, {machine['cores']} cores")
    write(given.output, grouped, machine, given.rounds)
    unfinished.finish()
    console.print(f"\nWritten: {', '.join(str(p) for p in sorted(given.output.iterdir()))}")


class _Steps:
    """The text and the position of the progress bar."""

    def __init__(self, progress: Progress, task: TaskID, what: str) -> None:
        self.progress, self.task, self.what = progress, task, what

    def __call__(self, doing: str) -> None:
        self.progress.update(self.task, advance=1, description=f"{self.what}: {doing}")


@contextmanager
def _caches(kept: Path | None, model: str, threads: int) -> Iterator[Path]:
    """Yield a folder for the caches of all contenders: a temporary or a kept one."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="tvmify-bench-") as folder:
            yield Path(folder)
    else:
        folder = kept / f"{model}-{threads}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def compare(
    model: str, names: list[str], threads: int, rounds: int, folder: Path, step: _Steps
) -> list[Result]:
    """Return the results of all contenders on one model.

    Parameters
    ----------
    model, names
        The model, and the contenders.
    threads
        The number of threads that each may use.
    rounds
        The number of bursts of each contender.
    folder
        For caches, the reference and the ONNX file. Existing files are used.
    step
        Called with a text before each step.
    """
    results = {name: Result(model, threads, name) for name in names}
    try:
        make_reference(model, folder, onnx=bool(ONNX_READERS & set(names)))
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["the reference failed"])[-1]
        for result in results.values():
            result.reason = reason
        return list(results.values())
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        for name, result in results.items():
            step(f"preparing {CONTENDERS[name].title}")
            command = [sys.executable, "-m", "benchmarks.worker", model, name, str(threads)]
            worker = Worker([*command, str(folder)], folder, name, threads)
            worker = stack.enter_context(worker)
            try:
                report = first_of(folder, name, worker.answer())
            except WorkerError as error:
                result.reason = str(error)
                continue
            result.first_call_s, result.error = report["first_call_s"], report["error"]
            result.remark = report["remark"]
            workers[name] = worker
        take_turns(workers, results, rounds, lambda number: step(f"round {number + 1}"))
    return list(results.values())


def make_reference(model: str, folder: Path, onnx: bool) -> None:
    """Compute the expected outputs, unless a kept folder has them."""
    done = folder / ("outputs.pt" if not onnx else "export.json")
    if done.exists() and (folder / "outputs.pt").exists():
        return
    command = [sys.executable, "-m", "benchmarks.reference", model, str(folder)]
    command += ["--onnx"] if onnx else []
    subprocess.run(command, check=True, capture_output=True, text=True)


def first_of(folder: Path, name: str, report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the first-call time of the run that filled the caches."""
    cold = folder / f"{name}.json"
    if cold.exists():
        return report | {"first_call_s": json.loads(cold.read_text(encoding="utf-8"))}
    cold.write_text(json.dumps(report["first_call_s"]), encoding="utf-8")
    return report


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores, and the versions of the measured packages."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(folder: Path, grouped: list[Row], machine: dict[str, Any], rounds: int) -> None:
    """Write ``bench.json`` and, if matplotlib is installed, ``bench.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [result.record() for row in grouped for result in row.results.values()]
    record = {"machine": machine, "rounds": rounds, "results": records}
    (folder / "bench.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    try:
        from benchmarks.plot import plot
    except ModuleNotFoundError:
        return
    plot(grouped, f"{machine['processor']}, {machine['cores']} cores", folder / "bench.png")


if __name__ == "__main__":
    main()
