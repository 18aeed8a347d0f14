"""Compare the kernels that the rules choose with the fastest of a search.

    python -m benchmarks.heuristic build      every candidate for every shape of shapes.txt
    python -m benchmarks.heuristic measure    time them, the most doubtful shapes several times
    python -m benchmarks.heuristic report     compare the rules' present choice with the fastest

The first two stop after some seconds: run them again until nothing is left. Kernels and times are
kept, so a change of the rules needs only its new candidates; a change of a kernel's code needs
another folder. On a shared machine, run ``measure`` when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.shapes import Shape
from tvmify.artifact import Artifact
from tvmify.compiler.environment import prepare_tvm
from tvmify.runtime import cpu_features, measure
from tvmify.target import target_for

#: By distance from the fastest, in percent: the share of shapes that should be within it.
GOALS = {10: 0.80, 25: 1.00}
#: A shape that seems to lose more than the first number is measured this many times, since one of
#: ten candidates is the fastest by luck.
_DOUBTFUL, _VISITS = 0.05, 5
#: A kernel that takes more seconds to build is reported.
_SLOW = 3.0


@dataclass
class Record:
    """The measurements of a shape: seconds of its candidates, for each visit."""

    visits: list[dict[str, float]] = field(default_factory=list)

    def knows(self, names: Iterable[str]) -> bool:
        """Whether all of these candidates were measured side by side."""
        wanted = set(names)
        return any(wanted <= visit.keys() for visit in self.visits)

    def times(self, base: str) -> dict[str, float]:
        """Return the time of each candidate relative to `base`.

        Ratios are taken within a visit, as the speed of the machine varies between visits. The
        result is the median of the visits, as one may be lucky.
        """
        ratios: dict[str, list[float]] = {}
        for visit in self.visits:
            for name in visit if base in visit else ():
                ratios.setdefault(name, []).append(visit[name] / visit[base])
        return {name: median(found) for name, found in ratios.items()}

    def lost(self, base: str) -> float:
        """Return how much faster than `base` the fastest candidate is, as a fraction."""
        return 1 / min(self.times(base).values()) - 1

    def seconds(self, name: str) -> float:
        """Return the shortest time of a candidate."""
        return min(visit[name] for visit in self.visits if name in visit)


def main() -> None:
    """Do one of the three steps."""
    parser = argparse.ArgumentParser(description="Compare the rules' kernels with a search.")
    parser.add_argument("step", choices=["build", "measure", "report"])
    parser.add_argument("--folder", type=Path, default=Path("build/heuristic"))
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit in seconds")
    parser.add_argument("--only", default="", help="shapes whose line contains this text")
    options = parser.parse_args()
    wanted = {s: m for s, m in shapes.read().items() if options.only in f"{s} {m}"}
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare_tvm()
    if options.step == "build":
        _build(wanted, options.folder, options.seconds)
    elif options.step == "measure":
        _measure(wanted, options.folder, options.seconds)
    else:
        _report(wanted, read_records(options.folder))


def _candidates(shape: Shape) -> tuple[str, list[str]]:
    """Return the workload of a shape and the names that the rules give its candidates."""
    from tvmify.compiler import pipeline
    from tvmify.compiler.kernels.common.choice import Choices
    from tvmify.compiler.kernels.matmul import libraries
    from tvmify.compiler.tune.samples import collect

    target = pipeline.tvm_target(target_for(None, "cpu", cpu_features()))
    candidates = collect(shape.sample().ir_mod(), target, Choices(most=99)).candidates
    calls = {line.name for line in libraries.LIBRARIES}  # the choice to call one comes before
    ours = (asked for asked in candidates.items() if calls.isdisjoint(asked[1]))
    return next(ours, ("", []))


def _build(wanted: Iterable[Shape], folder: Path, seconds: float) -> None:
    from tvmify.compiler import pipeline
    from tvmify.compiler.kernels.common.choice import Choices
    from tvmify.compiler.tune.samples import lower_sample

    target = pipeline.tvm_target(target_for(None, "cpu", cpu_features()))
    end = time.monotonic() + seconds
    one_at_a_time = threading.Lock()

    def build(shape: Shape, workload: str, name: str) -> bool:
        if time.monotonic() > end:
            return False
        begun = time.monotonic()
        with one_at_a_time:
            finish = lower_sample(shape.sample(), target, Choices(measured={workload: name}))
        artifact = finish()
        if time.monotonic() - begun > _SLOW:
            print(f"{time.monotonic() - begun:.0f} s to build {shape}: {name}")
        path = _path(folder, shape, name)
        path.with_suffix(".so").write_bytes(artifact.library)
        path.write_text(json.dumps(artifact.description()))
        return True

    jobs = []
    for shape in wanted:
        workload, names = _candidates(shape)
        jobs += [(shape, workload, n) for n in names if not _path(folder, shape, n).exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = sum(pool.map(lambda job: build(*job), jobs))
    print(f"{len(jobs) - built} kernels are left to build")


def _measure(wanted: Iterable[Shape], folder: Path, seconds: float) -> None:
    records = read_records(folder)
    end = time.monotonic() + seconds
    candidates = {}
    for shape in wanted:
        _, names = _candidates(shape)
        built = [name for name in names if _path(folder, shape, name).exists()]
        if len(built) > 1 and names[0] in built:
            candidates[shape] = built

    def visits(shape: Shape) -> int | None:
        """Return how often a shape was measured, or None if that is enough."""
        record, names = records.setdefault(str(shape), Record()), candidates[shape]
        if not record.knows(names):
            return 0
        doubtful = len(record.visits) < _VISITS and record.lost(names[0]) > _DOUBTFUL
        return len(record.visits) if doubtful else None

    while time.monotonic() < end:
        todo = {shape: count for shape in candidates if (count := visits(shape)) is not None}
        if not todo:
            break
        shape = min(todo, key=todo.__getitem__)
        names = candidates[shape]
        times = dict(zip(names, _times(shape, names, folder), strict=True))
        records[str(shape)].visits.append(times)
        kept = {name: record.visits for name, record in records.items()}
        (folder / "times.json").write_text(json.dumps(kept, indent=1))
    left = sum(visits(shape) is not None for shape in candidates)
    print(f"{left} shapes are left to measure")


def _times(shape: Shape, names: Sequence[str], folder: Path) -> list[float]:
    artifacts = [
        Artifact.from_description(path.with_suffix(".so").read_bytes(), json.loads(text))
        for path in (_path(folder, shape, name) for name in names)
        for text in [path.read_text()]
    ]
    if shape.image:
        operands = [shape.image, (shape.columns, *[shape.window[0]] * 2, shape.image[3])]
    else:
        operands = [(shape.rows, shape.depth), (shape.depth, shape.columns)]
    image, weight = (torch.randn(operand) for operand in operands)
    return measure(artifacts, [image], [weight])


def _report(wanted: dict[Shape, str], records: dict[str, Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("shape", "of", "rules'", "µs", "fastest", "µs", "lost", "measured")
    rows: list[tuple[float, list[Any]]] = []
    missing = 0
    for shape, model in wanted.items():
        record = records.get(str(shape), Record())
        _, names = _candidates(shape)
        if len(names) < 2:
            rows.append((0.0, [shape, model, *names, "", "", "", "", "no choice"]))
            continue
        own = names[0]
        if not record.knows([own]):
            missing += 1
            continue
        times = record.times(own)
        best, lost = min(times, key=times.__getitem__), record.lost(own)
        micros = [f"{record.seconds(own) * factor * 1e6:.0f}" for factor in (1, times[best])]
        figures = [own, micros[0], best, micros[1], f"{lost:.0%}", len(record.visits)]
        rows.append((lost, [shape, model, *figures]))
    for _, row in sorted(rows, key=lambda row: -row[0]):
        table.add_row(*map(str, row))
    console = Console(width=200)
    console.print(table)
    if missing:
        console.print(f"{missing} shapes are not measured")
    for percent, goal in GOALS.items():
        within = sum(lost <= percent / 100 for lost, _ in rows)
        goal_count = ceil(goal * len(rows))
        console.print(f"{within} of {len(rows)} within {percent} % (goal: {goal_count})")


def _path(folder: Path, shape: Shape, name: str) -> Path:
    return folder / f"{sha256(f'{shape} {name}'.encode()).hexdigest()[:16]}.json"


def read_records(folder: Path) -> dict[str, Record]:
    """Return the measurements, by the text of the shape."""
    path = folder / "times.json"
    if not path.exists():
        return {}
    return {shape: Record(visits) for shape, visits in json.loads(path.read_text()).items()}


if __name__ == "__main__":
    main()
