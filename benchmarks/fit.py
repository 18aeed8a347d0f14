"""Fit the costs of matrix products in ``compiler/costs/`` to measured times.

    python -m benchmarks.heuristic build --only matmul      until nothing is left
    python -m benchmarks.heuristic measure --only matmul    likewise, while nothing else runs
    python -m benchmarks.fit

Prints, for the fields of ``costs.Matmul`` in which `nanoseconds` is linear, the present values and
the fitted ones: non-negative least squares of the relative errors. Then it prints the error of
both. On a busy machine the error is large, and the values mean little.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from benchmarks import heuristic
from benchmarks.shapes import Shape
from tvmify.compiler.costs import MATMUL, numbers
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.kernels.matmul.plan import Plan, Workload
from tvmify.compiler.microarchitecture import Microarchitecture

#: The fields in which the estimate is linear.
FITTED: tuple[str, ...] = (
    "cycle",
    "far_byte",
    "near_byte",
    "sum_byte",
    "spilled_byte",
    "left_byte",
    "result_byte",
    "foreign_byte",
)
_BITS = 32


@dataclass(frozen=True)
class Timing:
    """How long a plan of a product took.

    Attributes
    ----------
    work, plan
        The product, and how it is blocked.
    nanoseconds
        The time, with `cores` threads.
    """

    work: Workload
    plan: Plan
    nanoseconds: float
    cores: int


@dataclass(frozen=True)
class Fit:
    """Values of the fields, and the median relative error of an estimate with them."""

    values: Mapping[str, float]
    error: float


def estimator(machine: Microarchitecture) -> Callable[[Timing, Mapping[str, float]], float]:
    """Return a function that estimates a timing with other values of the fields."""

    def estimate(timing: Timing, values: Mapping[str, float]) -> float:
        with patch.object(plans, "MATMUL", replace(MATMUL, **values)):
            return plans.nanoseconds(timing.work, timing.plan, machine, _BITS, timing.cores)

    return estimate


def fit(timings: list[Timing], machine: Microarchitecture) -> Fit:
    """Fit the fields to times: non-negative least squares of the relative errors."""
    estimate = estimator(machine)
    zero = dict.fromkeys(FITTED, 0.0)
    rows, targets = [], []
    for timing in timings:
        fixed = estimate(timing, zero)  # forks
        terms = [estimate(timing, {**zero, name: 1.0}) - fixed for name in FITTED]
        rows.append([term / timing.nanoseconds for term in terms])
        targets.append(1 - fixed / timing.nanoseconds)
    matrix = torch.tensor(rows, dtype=torch.float64)
    target = torch.tensor(targets, dtype=torch.float64)[:, None]
    kept = [i for i in range(len(FITTED)) if matrix[:, i].any()]
    while True:
        solution = torch.linalg.lstsq(matrix[:, kept], target, driver="gelsd").solution[:, 0]
        negative = [i for i, value in zip(kept, solution.tolist(), strict=True) if value < 0]
        if not negative:
            break
        kept = [i for i in kept if i not in negative]
    found = {FITTED[i]: value for i, value in zip(kept, solution.tolist(), strict=True)}
    values = {**zero, **found}
    return Fit(values, error_of(timings, values, machine))


def error_of(
    timings: list[Timing], values: Mapping[str, float], machine: Microarchitecture
) -> float:
    """Return the median relative error of the estimates."""
    estimate = estimator(machine)
    return median(abs(estimate(t, values) / t.nanoseconds - 1) for t in timings)


def read(folder: Path, machine: Microarchitecture, cores: int) -> list[Timing]:
    """Return the times of matrix products that ``benchmarks.heuristic`` keeps in a folder."""
    timings = []
    for text, record in heuristic.read_records(folder).items():
        shape = Shape.parse(text)
        if shape.image:
            continue
        work = Workload(1, shape.rows, shape.columns, shape.depth, "float32", packed=True)
        for plan in plans.candidates(work, machine, _BITS):
            if record.knows([str(plan)]):
                timings.append(Timing(work, plan, record.seconds(str(plan)) * 1e9, cores))
    return timings


def main() -> None:
    """Fit, and print."""
    from tvmify.compiler import pipeline
    from tvmify.compiler.environment import prepare_tvm
    from tvmify.runtime import cpu_features
    from tvmify.target import target_for

    parser = argparse.ArgumentParser(
        description="Fit the costs of matrix products to measured times."
    )
    parser.add_argument("--folder", type=Path, default=Path("build/heuristic"))
    options = parser.parse_args()
    prepare_tvm()
    machine = Microarchitecture.of(pipeline.tvm_target(target_for(None, "cpu", cpu_features())))
    cores = torch.get_num_threads()
    timings = read(options.folder, machine, cores)
    if len(timings) <= len(FITTED):
        parser.error(f"{options.folder} has {len(timings)} times: build and measure more first")
    found = fit(timings, machine)
    present = {name: getattr(MATMUL, name) for name in FITTED}
    table = numbers(MATMUL)
    print(f"{len(timings)} kernels, {cores} threads, {_processor()}, commit {_commit()}")
    for name in FITTED:
        unit = table[name][1]
        print(f"{name:12} {present[name]:8.4g} -> {found.values[name]:8.4g} {unit}")
    print(f"{'error':12} {error_of(timings, present, machine):8.0%} -> {found.error:8.0%} (median)")


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    return name[1] if name else platform.machine()


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
