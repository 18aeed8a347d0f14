"""Products of one row: a library's or a kernel of ours, as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiler.gpu_programs import (
    ALWAYS_A_KERNEL,
    code_of,
    exported,
    gpu,
    needs_nvcc,
)
from tvmify.artifact import Artifact
from tvmify.cache import Measurements
from tvmify.compiler import Tuning, compile

KERNEL, LIBRARY = b"row_product", b"aten::linear"


class Clock:
    """Says how long the forms of each product take: first the library's, then the kernel's."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.measured: list[Sequence[Artifact]] = []
        self.shapes: list[list[tuple[int, ...]]] = []

    def __call__(
        self,
        artifacts: Sequence[Artifact],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> list[float]:
        self.measured.append(artifacts)
        self.shapes.append([tuple(tensor.shape) for tensor in [*inputs, *weights]])
        return self.seconds


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return two layers, of which the second has no bias."""
    layers = nn.Linear(160, 128), nn.ReLU(), nn.Linear(128, 144, bias=False)
    return nn.Sequential(*layers).eval().to(dtype)


def built(rows: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Artifact:
    return compile(exported(mlp(dtype), torch.randn(rows, 160).to(dtype)), gpu(), **options)


def forms(artifact: Artifact) -> tuple[int, int]:
    """How many products are kernels, and how many a library's."""
    kernels = artifact.report["kernels"].values()
    calls = sum(artifact.library.count(f"aten::{name}".encode()) for name in ("linear", "matmul"))
    return list(kernels).count("row product"), calls


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_compile_and_take_in_what_follows(arch: str, dtype: torch.dtype):
    program = exported(mlp(dtype), torch.randn(1, 160).to(dtype))
    artifact = compile(program, gpu(arch), tuning=ALWAYS_A_KERNEL)
    assert {generation for _, generation in code_of(artifact.library)} == {int(arch.strip("sm_a"))}
    assert forms(artifact) == (2, 0)
    assert any("row_product" in name and "relu" in name for name in artifact.report["kernels"])


@needs_nvcc
@pytest.mark.parametrize(("seconds", "expected"), [((1, 2), (0, 2)), ((2, 1), (2, 0))])
def test_the_faster_form_is_taken_and_remembered(
    seconds: tuple[float, float], expected: tuple[int, int]
):
    database, clock = Measurements(None, "gpu"), Clock(*seconds)
    artifact = built(tuning=Tuning(clock, database))
    assert forms(artifact) == expected
    assert artifact.report["tuning"]["measured"] == 2
    assert sorted(clock.shapes) == [[(1, 128), (144, 128)], [(1, 160), (128, 160), (128,)]]
    for library, kernel in clock.measured:
        assert forms(library) == (0, 1) and forms(kernel) == (1, 0)
        assert library.target == kernel.target == '{"arch": "sm_80", "kind": "cuda"}'
    again = built(tuning=Tuning(Clock(), database))
    assert forms(again) == expected and again.report["tuning"]["measured"] == 0


@needs_nvcc
def test_without_a_measurement_it_is_the_library_s():
    assert forms(built()) == (0, 2)


@needs_nvcc
@pytest.mark.parametrize("given", [{"rows": 2}, {"dtype": torch.float64}], ids=str)
def test_where_a_library_wins_anyway_nothing_is_measured(given: dict[str, Any]):
    artifact = built(**given, tuning=Tuning(Clock(), Measurements(None, "gpu")))
    assert forms(artifact) == (0, 2)
    assert artifact.report["tuning"]["workloads"] == 0


@needs_nvcc
def test_of_short_rows_nothing_is_measured():
    program = exported(nn.Linear(8, 4096).eval(), torch.randn(1, 8))
    artifact = compile(program, gpu(), tuning=Tuning(Clock(), Measurements(None, "gpu")))
    assert forms(artifact) == (0, 1)


@needs_nvcc
def test_a_product_of_two_arguments_is_the_library_s():
    program = exported(torch.matmul, torch.randn(1, 160), torch.randn(160, 128))
    artifact = compile(program, gpu(), tuning=Tuning(Clock(), Measurements(None, "gpu")))
    assert forms(artifact) == (0, 1)
