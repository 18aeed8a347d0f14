"""Hold the rules' choice of kernel against a search.

    python -m benchmarks.heuristic build      every candidate for every shape of shapes.txt
    python -m benchmarks.heuristic measure    them
    python -m benchmarks.heuristic report     the rules' present choice against the fastest

The first two stop after some seconds: run them again until nothing is left. Times are kept, so
that a change of the rules needs only the candidates that are new. On a machine that is shared,
run ``measure`` when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.shapes import Shape
from tvmify.artifact import Artifact
from tvmify.compiler.environment import prepare_tvm
from tvmify.runtime import cpu_features, measure
from tvmify.target import target_for

#: So many tiles are searched: the tuner is offered fewer.
_SEARCHED = 5
#: Shares of shapes that are to be within so many percent of the fastest.
GOALS = {10: 0.80, 25: 1.00}

Times = dict[str, dict[str, float]]


def main() -> None:
    """Do one of the three steps."""
    parser = argparse.ArgumentParser(description="The rules' kernels against a search")
    parser.add_argument("step", choices=["build", "measure", "report"])
    parser.add_argument("--folder", type=Path, default=Path("build/heuristic"))
    parser.add_argument("--seconds", type=float, default=30.0, help="to build or measure for")
    parser.add_argument("--only", default="", help="shapes whose line holds this text")
    options = parser.parse_args()
    wanted = {s: m for s, m in shapes.read().items() if options.only in f"{s} {m}"}
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.step == "build":
        _build(wanted, options.folder, options.seconds)
    elif options.step == "measure":
        _measure(wanted, options.folder, options.seconds)
    else:
        _report(wanted, _times(options.folder))


def _candidates(shape: Shape) -> tuple[str, list[str]]:
    """Return the workload of a shape and the names that the rules give its candidates."""
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.samples import samples_of
    from tvmify.compiler.schedule import tiles
    from tvmify.compiler.schedule.choice import Choices

    tiles.MOST_CANDIDATES = _SEARCHED
    choices = Choices()
    target = pipeline.tvm_target(target_for(None, "cpu", cpu_features()))
    samples_of(shape.sample().ir_mod(), target, choices)
    return next(iter(choices.asked.items()), ("", []))


def _build(wanted: Iterable[Shape], folder: Path, seconds: float) -> None:
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.samples import compile_sample
    from tvmify.compiler.schedule.choice import Choices

    target = pipeline.tvm_target(target_for(None, "cpu", cpu_features()))
    known = _times(folder)

    end = time.monotonic() + seconds

    def build(shape: Shape, workload: str, name: str) -> bool:
        if time.monotonic() > end:
            return False
        artifact = compile_sample(shape.sample(), target, Choices(measured={workload: name}))
        path = _path(folder, shape, name)
        path.with_suffix(".so").write_bytes(artifact.library)
        path.write_text(json.dumps([str(shape), name, artifact.description()]))
        return True

    jobs = []
    for shape in wanted:
        workload, names = _candidates(shape)
        jobs += [
            (shape, workload, name)
            for name in names
            if name not in known.get(str(shape), {}) and not _path(folder, shape, name).exists()
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = sum(pool.map(lambda job: build(*job), jobs))
    print(f"{len(jobs) - built} kernels are left to build")


def _measure(wanted: Iterable[Shape], folder: Path, seconds: float) -> None:
    built: dict[str, dict[str, tuple[Path, Any]]] = {}
    for path in folder.glob("*.json"):
        if path.name != "times.json":
            shape, name, description = json.loads(path.read_text())
            built.setdefault(shape, {})[name] = path, description
    end = time.monotonic() + seconds
    times = _times(folder)
    left = [shape for shape in wanted if str(shape) in built]
    while left and time.monotonic() < end:
        shape = left.pop()
        kernels = built[str(shape)]
        artifacts = [
            Artifact.from_description(path.with_suffix(".so").read_bytes(), description)
            for path, description in kernels.values()
        ]
        if shape.image:
            operands = [shape.image, (shape.columns, *[shape.window[0]] * 2, shape.image[3])]
        else:
            operands = [(shape.rows, shape.depth), (shape.depth, shape.columns)]
        image, weight = (torch.randn(operand) for operand in operands)
        measured = dict(zip(kernels, measure(artifacts, [image], [weight]), strict=True))
        times.setdefault(str(shape), {}).update(measured)
        (folder / "times.json").write_text(json.dumps(times, indent=1))
        for path, _ in kernels.values():
            path.with_suffix(".so").unlink()
            path.unlink()
    print(f"{len(left)} shapes are left to measure")


def _report(wanted: dict[Shape, str], times: Times) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("shape", "of", "rules'", "µs", "fastest", "µs", "lost")
    lost = []
    for shape, model in wanted.items():
        known = times.get(str(shape), {})
        _, names = _candidates(shape)
        if len(names) < 2 or names[0] not in known:
            continue
        best = min(known, key=known.__getitem__)
        lost.append(known[names[0]] / known[best] - 1)
        figures = [f"{known[name] * 1e6:.0f}" for name in (names[0], best)]
        share = f"{lost[-1]:.0%}"
        table.add_row(str(shape), model, names[0], figures[0], best, figures[1], share)
    console = Console(width=150)
    console.print(table)
    for percent, goal in GOALS.items():
        within = sum(share <= percent / 100 for share in lost) / max(1, len(lost))
        console.print(f"{within:.0%} of {len(lost)} within {percent} % (goal {goal:.0%})")


def _path(folder: Path, shape: Shape, name: str) -> Path:
    return folder / f"{sha256(f'{shape} {name}'.encode()).hexdigest()[:16]}.json"


def _times(folder: Path) -> Times:
    path = folder / "times.json"
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
