from __future__ import annotations

import json

import pytest

from benchmarks import fit
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.microarchitecture import Microarchitecture

MACHINE = Microarchitecture(512, 32, 48 << 10, 1 << 20, memory_operands=True)
SHAPES = [(1, 768, 768), (16, 512, 1024), (64, 256, 2048), (128, 768, 3072), (512, 1024, 512)]
TRUE = {
    "cycle": 0.9,
    "far_byte": 0.05,
    "near_byte": 0.01,
    "sum_byte": 0.02,
    "spilled_byte": 0.003,
    "left_byte": 0.02,
    "result_byte": 0.03,
    "foreign_byte": 0.01,
}


def timings() -> list[fit.Timing]:
    """Return the times of plans according to these costs."""
    estimate = fit.estimator(MACHINE)
    found = []
    for rows, depth, columns in SHAPES:
        work = plans.Workload(1, rows, columns, depth, "float32", packed=True)
        for plan in plans.candidates(work, MACHINE, 32):
            timing = fit.Timing(work, plan, 1.0, 2)
            found.append(fit.Timing(work, plan, estimate(timing, TRUE), 2))
    return found


def test_costs_are_found_again_from_times_made_with_them() -> None:
    times = timings()
    found = fit.fit(times, MACHINE)
    assert found.error < 1e-6
    for timing in times:
        estimate = fit.estimator(MACHINE)(timing, found.values)
        assert estimate == pytest.approx(timing.nanoseconds, rel=1e-6)
    assert found.values["cycle"] == pytest.approx(TRUE["cycle"], rel=1e-3)
    assert found.values["far_byte"] == pytest.approx(TRUE["far_byte"], rel=1e-3)


def test_no_cost_is_negative() -> None:
    half = [
        fit.Timing(t.work, t.plan, t.nanoseconds / (1 + i % 3), 2) for i, t in enumerate(timings())
    ]
    found = fit.fit(half, MACHINE)
    assert min(found.values.values()) >= 0


def test_only_product_times_are_read(tmp_path) -> None:
    work = plans.Workload(1, 16, 1024, 512, "float32", packed=True)
    plan, other, *_ = plans.candidates(work, MACHINE, 32)
    kept = {
        "matmul 16x512 512x1024": [{str(plan): 2e-5, "of another table": 1e-5}, {str(plan): 1e-5}],
        "conv2d 1x7x7x8 to 8 window 1 stride 1 padding 0": [{str(other): 1e-5}],
    }
    (tmp_path / "times.json").write_text(json.dumps(kept))
    assert fit.read(tmp_path, MACHINE, 2) == [fit.Timing(work, plan, 1e-5 * 1e9, 2)]
