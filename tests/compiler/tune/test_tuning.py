"""Choices by measurement, with a fake stopwatch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.compiler.programs import executed, recorded, target
from tests.tolerances import assert_close_to_reference
from tvmify.artifact import Artifact
from tvmify.cache import Measurements
from tvmify.compiler import Tuning, compile, pipeline
from tvmify.compiler.costs import COMPACT
from tvmify.compiler.kernels.common.choice import Choices
from tvmify.compiler.kernels.matmul import pairs
from tvmify.compiler.kernels.recurrent.plan import Plan, candidates
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.pipeline import tvm_target


class Stopwatch:
    """Measures the last candidate as the fastest, and records its arguments."""

    def __init__(self, breaks_after: int = 1000) -> None:
        self.measured: list[Sequence[Artifact]] = []
        self.shapes: list[list[tuple[int, ...]]] = []
        self.breaks_after = breaks_after

    def __call__(self, artifacts, inputs, weights):
        if len(self.measured) == self.breaks_after:
            raise KeyboardInterrupt
        self.measured.append(artifacts)
        self.shapes.append([tuple(tensor.shape) for tensor in [*inputs, *weights]])
        return [float(len(artifacts) - i) for i in range(len(artifacts))]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 40))


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 96, 1, stride=2))


def tuned(
    module: nn.Module,
    database: Measurements,
    stopwatch: Stopwatch,
    args: tuple[torch.Tensor, ...] | None = None,
    **options,
) -> Artifact:
    args = args or (torch.randn(24, 96),)
    with torch.no_grad():
        exported = recorded(module, args)
        tuning = Tuning(stopwatch, database, **options)
        artifact = compile(exported, target(), tuning=tuning)
        assert_close_to_reference(executed(artifact, module, *args), module, args)
    return artifact


class Whole(nn.Module):
    """A kernel for each rule that chooses by the whole function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(203)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normal = self.norm(x)
        return normal.softmax(0), normal[:, 3:] * 2


class Attention(nn.Module):
    """One projection for queries, keys and values, as in GPT-2, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        result = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        return result.transpose(1, 2).flatten(2)


class Tuned(NamedTuple):
    """An MLP, and the results of tuning it."""

    module: nn.Module
    database: Measurements
    stopwatch: Stopwatch
    artifact: Artifact
    told: list[tuple[int, int]]
    lowering: set[int]


@pytest.fixture(scope="module")
def tuned_mlp() -> Tuned:
    torch.manual_seed(0)
    module, database, stopwatch = mlp(), Measurements(None, "cpu"), Stopwatch()
    told: list[tuple[int, int]] = []
    lowering: set[int] = set()
    lower = pipeline.lower

    def noted(*given):
        lowering.add(threading.get_ident())
        return lower(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "lower", noted)
        artifact = tuned(
            module, database, stopwatch, on_progress=lambda done, total: told.append((done, total))
        )
    return Tuned(module, database, stopwatch, artifact, told, lowering)


def test_winners_are_used(tuned_mlp):
    module, artifact = tuned_mlp.module, tuned_mlp.artifact
    report = artifact.report["tuning"]
    assert (report["workloads"], report["measured"], report["left"]) == (2, 2, 0)
    assert len(report["changed"]) == 2
    assert not report["failed"]
    with torch.no_grad():
        by_rule = compile(torch.export.export(module, (torch.randn(24, 96),)), target())
    assert artifact.library != by_rule.library
    assert artifact.library == tuned(module, tuned_mlp.database, Stopwatch()).library


def test_lowering_stays_in_one_thread(tuned_mlp):
    assert tuned_mlp.lowering == {threading.get_ident()}


def test_candidates_use_program_shapes_largest_first(tuned_mlp):
    stopwatch = tuned_mlp.stopwatch
    assert stopwatch.shapes == [[(24, 96), (96, 160)], [(24, 160), (160, 40)]]
    assert all(len(artifacts) > 1 for artifacts in stopwatch.measured)


def test_progress_is_reported(tuned_mlp):
    told = tuned_mlp.told
    assert told[0] == (0, 2)
    assert told == sorted(told)


def test_known_workloads_are_not_measured_again(tuned_mlp):
    database, stopwatch = tuned_mlp.database, Stopwatch()
    deeper = nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(40, 8)).eval()
    report = tuned(deeper, database, stopwatch).report["tuning"]
    assert (report["workloads"], report["measured"]) == (3, 1)
    assert stopwatch.shapes == [[(24, 40), (40, 8)]]


@pytest.mark.parametrize(
    ("module", "shape", "count"),
    [
        pytest.param(mlp(), (24, 96), 2, id="linear"),
        pytest.param(
            convolutions(), (1, 64, 14, 14), 1, id="conv"
        ),  # the first one transposes its image
    ],
)
def test_products_of_bfloat16_are_measured_as_such(monkeypatch, module, shape, count):
    # In pairs on any processor.
    monkeypatch.setattr(pairs, "COMPACT", replace(COMPACT, few_unpacked=0.1))
    monkeypatch.setattr(Microarchitecture, "keeps", lambda self, size: False)
    database, stopwatch = Measurements(None, "cpu"), Stopwatch()
    x = torch.randn(shape).bfloat16()
    artifact = tuned(module.bfloat16(), database, stopwatch, (x,))
    report = artifact.report["tuning"]
    assert report["workloads"] == report["measured"] == len(report["changed"])
    products = [name for name in report["changed"] if not name.startswith("elementwise")]
    assert len(products) == 2
    assert sum("pairs" in workload for workload in report["changed"]) == count
    for artifacts in stopwatch.measured:
        assert len({artifact.library for artifact in artifacts}) > 1


def test_interrupt_keeps_finished_measurements():
    database, stopwatch = Measurements(None, "cpu"), Stopwatch(breaks_after=1)
    with pytest.raises(KeyboardInterrupt):
        tuned(mlp(), database, stopwatch)
    assert len(database) == 1
    report = tuned(mlp(), database, Stopwatch()).report["tuning"]
    assert (report["workloads"], report["measured"]) == (2, 1)


def test_time_is_bounded():
    stopwatch = Stopwatch()
    report = tuned(mlp(), Measurements(None, "cpu"), stopwatch, limit=-1.0).report["tuning"]
    assert (report["workloads"], report["measured"], report["left"]) == (2, 0, 2)
    assert not stopwatch.measured


@pytest.mark.parametrize(("cores", "measured"), [(2, 1), (64, 2)])
def test_time_limit_applies_from_the_first_workload(monkeypatch, cores, measured):
    now = 0.0
    monkeypatch.setattr("tvmify.compiler.tune.tuning.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("os.cpu_count", lambda: cores)

    class Slow(Stopwatch):
        def __call__(self, artifacts, inputs, weights):
            nonlocal now
            now += 15.0
            return super().__call__(artifacts, inputs, weights)

    sizes = 96, 160, 40, 24, 56
    module = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    report = tuned(module, Measurements(None, "cpu"), Slow(), limit=20.0).report["tuning"]
    assert (report["measured"], report["left"]) == (measured, 4 - measured)


def test_unmeasurable_workload_follows_the_rules():
    def fails(*_):
        raise RuntimeError("out of memory\nand so on")

    database = Measurements(None, "cpu")
    report = tuned(mlp(), database, fails).report["tuning"]
    assert set(report["failed"].values()) == {"RuntimeError: out of memory"}
    assert (report["workloads"], report["measured"], len(database)) == (2, 0, 0)


@pytest.mark.parametrize(("dtype", "queries"), [(torch.bool, 40), (torch.float32, 6)], ids=str)
def test_attention(dtype, queries):
    mask = torch.randn(1, 1, queries, queries)
    args = torch.randn(2, queries, 64), mask if dtype == torch.float32 else mask > -1
    stopwatch, database, module = Stopwatch(), Measurements(None, "cpu"), Attention()
    artifact = tuned(module, database, stopwatch, args)
    report = artifact.report["tuning"]
    assert not report["failed"]
    (workload,) = (name for name in report["changed"] if name.startswith("attention"))
    assert workload.endswith(f"mask 1x1x{queries}x{queries} {str(dtype)[6:]}")
    # All three are in one tensor, in which each has its own heads.
    shapes = [*[(2, queries, 12, 16)] * 3, (1, 1, queries, queries)]
    artifacts = stopwatch.measured[stopwatch.shapes.index(shapes)]
    assert len({candidate.library for candidate in artifacts}) == len(artifacts) > 1
    assert all("attention" in candidate.report["kernels"].values() for candidate in artifacts)
    by_rule = tuned(module, Measurements(None, "cpu"), Stopwatch(), args, limit=-1.0)
    assert artifact.library != by_rule.library


@pytest.mark.thorough
def test_windows():
    module = nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(16, 24, 1),
        nn.AvgPool2d(2),
    )
    stopwatch = Stopwatch()
    args = (torch.randn(1, 16, 40, 40),)
    report = tuned(module, Measurements(None, "cpu"), stopwatch, args).report["tuning"]
    assert not report["failed"]
    # Whether the 24 channels of the last fill vectors depends on the processor.
    ends = {"depthwise": "rows", "max_pool2d": "pixels", "avg_pool2d": ("rows", "pixels")}
    for kind, end in ends.items():
        (winner,) = (report["changed"][name] for name in report["changed"] if kind in name)
        assert winner.endswith(end)
    image = (1, 40, 40, 16)
    transposed = [(1, 16, 40, 40)], [(1, 10, 10, 24)]  # on the way in and out
    # A pixel has more products with 16 channels than with a window of 3 × 3.
    assert [shapes for shapes in stopwatch.shapes if shapes not in transposed] == [
        [(1, 20, 20, 16), (24, 1, 1, 16)],
        [image, (16, 3, 3, 1)],
        [image],
        [(1, 20, 20, 24)],
    ]


@pytest.mark.thorough
def test_kernels_scheduling_the_whole_function():
    stopwatch, module, args = Stopwatch(), Whole(), (torch.randn(300, 203),)
    artifact = tuned(module, Measurements(None, "cpu"), stopwatch, args)
    report = artifact.report["tuning"]
    assert not report["failed"]
    # Names begin with the rule and the result.
    assert sorted(name.rpartition(" ")[0] for name in report["changed"]) == [
        "column reduction 300x203 float32",
        "elementwise 300x200 float32",
        "reduction 300x203 float32",
    ]
    assert len(stopwatch.measured) == 3
    for artifacts in stopwatch.measured:
        assert len({candidate.library for candidate in artifacts}) > 1
        ((kernel,),) = {tuple(candidate.report["kernels"].items()) for candidate in artifacts}
        assert any(name.startswith(kernel[1]) for name in report["changed"])
    by_rule = tuned(module, Measurements(None, "cpu"), Stopwatch(), args, limit=-1.0)
    assert artifact.library != by_rule.library


@pytest.mark.thorough
def test_equal_kernels_are_measured_once_across_models():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(203), nn.LayerNorm(203)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(images))

    database, args = Measurements(None, "cpu"), (torch.randn(300, 203),)
    report = tuned(Other(), database, Stopwatch(), args).report["tuning"]
    assert (report["workloads"], report["measured"]) == (1, 1)
    report = tuned(Whole(), database, Stopwatch(), args).report["tuning"]
    assert (report["workloads"], report["measured"]) == (3, 2)


def test_packing_is_not_measured():
    args = (torch.randn(1, 512),)
    report = tuned(nn.Linear(512, 640), Measurements(None, "cpu"), Stopwatch(), args).report
    assert report["tuning"]["workloads"] == 1


class Recurrent(nn.Module):
    """Layers of the same size."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, *, bidirectional: bool = True) -> None:
        super().__init__()
        self.layers = kind(24, 40, layers, bidirectional=bidirectional)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_recurrent_layers():
    torch.manual_seed(0)
    module, args = Recurrent(nn.LSTM, 2), (torch.randn(7, 5, 24),)
    stopwatch = Stopwatch()
    artifact = tuned(module, Measurements(None, "cpu"), stopwatch, args, limit=600.0)
    report = artifact.report["tuning"]
    assert not report["failed"]
    name = "lstm 7x5x40 float32"
    # Equal layers and both directions are measured once, without the product of their inputs:
    # inputs of the sample have one feature.
    sample = [(7, 5, 1), *[(5, 40)] * 2, (4 * 40, 1), (4 * 40, 40)]
    assert stopwatch.shapes.count(sample) == 1
    assert [workload for workload in report["changed"] if workload.startswith(name)] == [name]
    candidates = stopwatch.measured[stopwatch.shapes.index(sample)]
    assert len({candidate.library for candidate in candidates}) == len(candidates) > 2
    assert all("lstm" in candidate.report["kernels"].values() for candidate in candidates)
    # The second layer's inputs are the results of both directions.
    assert {(7, 5, 24), (7, 5, 80)} < {shapes[0] for shapes in stopwatch.shapes}


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_each_recurrent_plan_is_right(kind):
    torch.manual_seed(0)
    machine = Microarchitecture.of(tvm_target(target()))
    gates = {nn.LSTM: 4, nn.GRU: 3}[kind]
    plans = candidates(Plan.of(7, 5, 40, gates, "float32", machine), machine)
    names = [str(plan) for plan in plans[: Choices().most]]
    libraries = set()
    for best in names:
        database = Measurements(None, "cpu")
        database.record(plans[0].workload, {name: 1.0 + (name != best) for name in names})
        args = (torch.randn(7, 5, 24),)
        module = Recurrent(kind, 1, bidirectional=False)
        artifact = tuned(module, database, Stopwatch(), args, limit=-1.0)
        libraries.add(artifact.library)
        changed = artifact.report["tuning"]["changed"]
        assert changed == ({} if best == names[0] else {plans[0].workload: best})
    assert len(libraries) == len(names)
