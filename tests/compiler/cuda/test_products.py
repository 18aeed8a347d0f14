"""Products of one row: our kernel, or a library call if it was measured faster."""

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
from tvmify.compiler.cuda.row_products import Shape

KERNEL, LIBRARY = b"row_product", b"aten::linear"


class Clock:
    """Fake times of the forms of each product: first the kernel, then the library."""

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
    """Return two layers; the second has no bias."""
    layers = nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 144, bias=False)
    return nn.Sequential(*layers).eval().to(dtype)


def built(rows: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Artifact:
    return compile(exported(mlp(dtype), torch.randn(rows, 256).to(dtype)), gpu(), **options)


def forms(artifact: Artifact) -> tuple[int, int]:
    """How many products are kernels, and how many are library calls."""
    kernels = artifact.report["kernels"].values()
    calls = sum(artifact.library.count(f"aten::{name}".encode()) for name in ("linear", "matmul"))
    return list(kernels).count("row product"), calls


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_compile_with_epilogues(arch: str, dtype: torch.dtype):
    program = exported(mlp(dtype), torch.randn(1, 256).to(dtype))
    artifact = compile(program, gpu(arch), tuning=ALWAYS_A_KERNEL)
    assert {generation for _, generation in code_of(artifact.library)} == {int(arch.strip("sm_a"))}
    assert forms(artifact) == (2, 0)
    assert any("row_product" in name and "relu" in name for name in artifact.report["kernels"])


@needs_nvcc
@pytest.mark.parametrize(("seconds", "expected"), [((1, 2), (2, 0)), ((2, 1), (0, 2))])
def test_the_faster_form_is_used_and_remembered(
    seconds: tuple[float, float], expected: tuple[int, int]
):
    database, clock = Measurements(None, "gpu"), Clock(*seconds)
    artifact = built(tuning=Tuning(clock, database))
    assert forms(artifact) == expected
    assert artifact.report["tuning"]["measured"] == 2
    assert sorted(clock.shapes) == [[(1, 256), (512, 256), (512,)], [(1, 512), (144, 512)]]
    for kernel, library in clock.measured:
        assert forms(library) == (0, 1) and forms(kernel) == (1, 0)
        assert library.target == kernel.target == '{"arch": "sm_80", "kind": "cuda"}'
    again = built(tuning=Tuning(Clock(), database))
    assert forms(again) == expected and again.report["tuning"]["measured"] == 0


@needs_nvcc
def test_without_a_measurement_it_is_a_kernel():
    assert forms(built()) == (2, 0)


@needs_nvcc
def test_without_a_measurement_rows_that_threads_cannot_share_are_the_library_s():
    assert forms(compile(exported(nn.Linear(200, 128).eval(), torch.randn(1, 200)), gpu())) == (
        0,
        1,
    )


@needs_nvcc
@pytest.mark.parametrize("given", [{"rows": 2}, {"dtype": torch.float64}], ids=str)
def test_obvious_library_win_is_not_measured(given: dict[str, Any]):
    artifact = built(**given, tuning=Tuning(Clock(), Measurements(None, "gpu")))
    assert forms(artifact) == (0, 2)
    assert artifact.report["tuning"]["workloads"] == 0


@needs_nvcc
def test_short_rows_are_not_measured():
    program = exported(nn.Linear(8, 4096).eval(), torch.randn(1, 8))
    artifact = compile(program, gpu(), tuning=Tuning(Clock(), Measurements(None, "gpu")))
    assert forms(artifact) == (0, 1)


@needs_nvcc
def test_a_product_of_two_arguments_is_the_library_s():
    program = exported(torch.matmul, torch.randn(1, 160), torch.randn(160, 128))
    artifact = compile(program, gpu(), tuning=Tuning(Clock(), Measurements(None, "gpu")))
    assert forms(artifact) == (0, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "length"),
    [(768, 768), (2304, 768), (768, 3072), (4096, 11008), (132, 1024), (7, 4096), (50257, 768)],
)
def test_shapes_of_kernels(rows: int, length: int, dtype: str):
    shape = Shape.of(rows, length, dtype)
    assert shape is not None
    assert shape.lanes * (4 if dtype == "float32" else 2) == 16  # bytes of a load
    assert length % (shape.lanes * shape.threads) == rows % shape.rows == 0
    assert rows // shape.rows >= min(rows, 132)
    assert 8 <= shape.threads <= 256 and shape.rows * shape.threads <= 512
    assert shape.rows > 1 or shape.threads >= 32
