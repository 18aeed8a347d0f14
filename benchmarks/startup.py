"""The time from the start of a process to the first result of ResNet-18, with a warm disk cache.

    python -m benchmarks.startup [--rounds 7] [--cold 2] [--json FILE]

Every run is its own process. Each cold run has an empty cache and compiles; the warm runs share a
filled one. They take turns, so that noise on the machine affects both. One cold run comes first and
is not counted: it fills the cache of the warm runs, and writes the bytecode of all modules, as an
installation does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: The goal: this share of a cold start, without importing torch and building the module.
GOAL = 0.10
#: Stages that any program has, compiled or not.
_BEFORE = ("import torch", "build the module")

#: Milliseconds of each stage: wall-clock time and CPU time.
Times = dict[str, tuple[float, float]]


class _Clock:
    """Times consecutive stages."""

    def __init__(self) -> None:
        self.times: Times = {}
        self._last = self._now()

    def end(self, stage: str) -> None:
        """End a stage that began when the last one ended."""
        last, self._last = self._last, self._now()
        wall, cpu = (1e3 * (now - then) for now, then in zip(self._last, last, strict=True))
        self.times[stage] = wall, cpu

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def work(is_warm: bool) -> dict[str, Any]:
    """Run in the new process: start as a service would, and return the times."""
    clock = _Clock()
    import torch

    clock.end("import torch")
    from benchmarks.models.vision import resnet18

    torch.manual_seed(0)
    module, (image,) = resnet18()
    clock.end("build the module")
    from tvmify import tvmify

    clock.end("import tvmify")
    # `strict` makes sure that compiled code is timed, even on a busy machine.
    fast: Any = tvmify(module, strict=True, progress=False)
    with torch.inference_mode():
        result = fast(image)
        clock.end("first call")
        fast(image)
        clock.end("second call")
    info = fast.cache_info()
    expected = (0, 1) if is_warm else (1, 0)
    if (info.builds, info.disk_hits) != expected:
        raise RuntimeError(f"it did not run from the cache as it should: {info}")
    if is_warm and "tvm" in sys.modules:
        raise RuntimeError("a warm process imported tvm")
    return {
        "times": clock.times,
        "stages": {stage: 1e3 * seconds for stage, seconds in info.seconds.items()},
        "result": hashlib.sha256(result.numpy().tobytes()).hexdigest(),
    }


def run(cache: Path, bytecode: Path, is_warm: bool) -> dict[str, Any]:
    """Measure in a new process, and return its result."""
    from benchmarks.process import answer_of  # not imported in the timed process

    surroundings = {
        "TVMIFY_CACHE_DIR": str(cache),
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.startup", "--work"]
    return answer_of([*command, "warm" if is_warm else "cold"], surroundings)


def measure(rounds: int, cold_rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the results of the warm processes, and of the cold ones."""
    warm, cold = [], []
    with tempfile.TemporaryDirectory() as folder:
        full, bytecode = Path(folder, "full"), Path(folder, "bytecode")
        run(full, bytecode, is_warm=False)
        run(full, bytecode, is_warm=True)  # also fills the page cache
        for number in range(rounds):
            warm.append(run(full, bytecode, is_warm=True))
            if len(cold) * rounds <= number * cold_rounds and len(cold) < cold_rounds:
                cold.append(run(Path(folder, f"cold {number}"), bytecode, is_warm=False))
    if len({answer["result"] for answer in warm + cold}) > 1:
        raise SystemExit("the processes computed different numbers")
    return warm, cold


def beyond(times: Times) -> tuple[float, float]:
    """Return the time to the first result, without the stages that any program has."""
    own = [times[stage] for stage in times if stage not in (*_BEFORE, "second call")]
    wall, cpu = map(sum, zip(*own, strict=True))
    return wall, cpu


def report(warm: Sequence[dict[str, Any]], cold: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the processes, and the ratio of warm to cold ones."""
    summary: dict[str, Any] = {}
    for name, answers in (("warm", warm), ("cold", cold)):
        first = answers[0]["times"]
        summary[name] = {
            "times": {stage: _medians([a["times"][stage] for a in answers]) for stage in first},
            "stages": {
                stage: statistics.median(a["stages"].get(stage, 0.0) for a in answers)
                for stage in answers[0]["stages"]
            },
            "beyond": _medians([beyond(a["times"]) for a in answers]),
        }
    pairs = zip(summary["warm"]["beyond"], summary["cold"]["beyond"], strict=True)
    summary["ratio"] = [ours / theirs for ours, theirs in pairs]
    return summary


def _medians(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def show(summary: dict[str, Any]) -> None:
    """Print the stages side by side, and the goal."""
    table = Table("milliseconds", title="ResNet-18, a new process", title_justify="left")
    for column in ("warm", "(processor)", "cold", "(processor)"):
        table.add_column(column, justify="right")
    warm, cold = summary["warm"], summary["cold"]
    for stage in warm["times"]:
        values = (*warm["times"][stage], *cold["times"][stage])
        table.add_row(stage, *(f"{value:.0f}" for value in values))
        if stage == "first call":
            for part in dict.fromkeys([*warm["stages"], *cold["stages"]]):
                found = (side["stages"].get(part) for side in (warm, cold))
                w, c = ("" if value is None else f"{value:.0f}" for value in found)
                table.add_row(f"  {part}", w, "", c, "")
    values = (*warm["beyond"], *cold["beyond"])
    table.add_section()
    table.add_row("without torch and module", *(f"{value:.0f}" for value in values))
    console = Console()
    console.print(table)
    wall, cpu = summary["ratio"]
    verdict = "met" if wall <= GOAL else "MISSED"
    console.print(
        f"a warm start takes {wall:.1%} of a cold compile ({cpu:.1%} of its processor time); "
        f"goal {GOAL:.0%}: {verdict}",
        soft_wrap=True,
    )


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="number of warm processes")
    parser.add_argument("--cold", type=int, default=2, help="number of cold processes")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    parser.add_argument("--work", choices=("warm", "cold"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        print(json.dumps(work(arguments.work == "warm")))
        return
    summary = report(*measure(arguments.rounds, arguments.cold))
    show(summary)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(summary, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
