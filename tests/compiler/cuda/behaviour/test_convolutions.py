"""Convolutions for GPUs with their epilogues, run on the CPU: all forms give right results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.gpu_programs import check
from tvmify.artifact import Artifact
from tvmify.compiler.kernels.common.choice import Choices, choosing

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


class Fastest(dict[str, str]):
    """Fake measurements by which one form is the fastest for any convolution."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def get(self, workload: str, default: Any = None) -> str:
        return self.form


class Normed(nn.Module):
    """Convolutions with batch norms, a residual, and ReLU at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        for norm in self.norms:
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(x)) + x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_batch_norms_are_in_the_weights(dtype: torch.dtype):
    artifact = check(Normed().eval().to(dtype), torch.randn(2, 3, 9, 9).to(dtype))
    kernels = [name for name in artifact.report["kernels"] if "relu" in name]
    assert len(kernels) == 2 and not any("multiply" in name for name in kernels)


@pytest.fixture
def cudnn() -> Iterator[None]:
    """Add two operators of cuDNN to PyTorch for the CPU."""
    library = torch.library.Library("aten", "IMPL")

    def relu(x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int):
        return F.conv2d(x, w, bias, stride, padding, dilation, groups).relu()

    def add_relu(x: Any, w: Any, z: Any, alpha: Any, bias: Any, *geometry: Any):
        return (F.conv2d(x, w, bias, *geometry) + alpha * z).relu()

    library.impl("cudnn_convolution_relu", relu, "CPU")
    library.impl("cudnn_convolution_add_relu", add_relu, "CPU")
    yield
    library._destroy()


@DTYPES
@pytest.mark.usefixtures("cudnn")
def test_a_convolution_includes_bias_residual_and_relu(dtype: torch.dtype):
    with choosing(Choices(measured=Fastest("fused"))) as collected:
        artifact = check(Normed().eval().to(dtype), torch.randn(2, 3, 9, 9).to(dtype))
    assert not any("relu" in name for name in artifact.report["kernels"])
    assert b"aten::cudnn_convolution_relu" in artifact.library
    assert b"aten::cudnn_convolution_add_relu" in artifact.library
    chains = [name for name in collected.candidates if name.startswith("convolution")]
    assert len(chains) == 2 and chains[1].endswith("+ bias + residual + relu")


class Bottleneck(nn.Module):
    """1 × 1 convolutions with batch norms: with ReLU, with a residual, and in the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 4, 1, bias=False)
        self.last = nn.Conv2d(4, 16, 1, bias=False)
        self.downsampling = nn.Conv2d(8, 16, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (4, 16, 16))
        for norm in self.norms:
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.last(inner)) + self.norms[2](self.downsampling(x)))


def forms(artifact: Artifact) -> tuple[int, int, int]:
    """How many kinds of convolutions, products with bias, and products with ReLU PyTorch computes.

    Those with results of the same shape count once, since a library has each text once.
    """
    names = "convolution", "linear", "_addmm_activation"
    convolutions, linear, relu = (
        artifact.library.count(f"aten::{name}(".encode()) for name in names
    )
    return convolutions, linear, relu


@DTYPES
@pytest.mark.parametrize(("form", "expected"), [("product", (0, 1, 1)), ("separate", (2, 0, 0))])
def test_convolutions_of_one_pixel_are_products_where_that_is_faster(
    dtype: torch.dtype, form: str, expected: tuple[int, int, int]
):
    with choosing(Choices(measured=Fastest(form))) as collected:
        artifact = check(Bottleneck().eval().to(dtype), torch.randn(2, 8, 6, 5).to(dtype))
    assert forms(artifact) == expected
    chains = {name.partition(" of 1 + ")[2]: found for name, found in collected.candidates.items()}
    relu, residual = chains["bias + relu"], chains["bias + residual + relu"]
    assert sorted(relu) == sorted(residual) == ["fused", "product", "separate"]
    assert sorted(chains["bias"]) == ["product", "separate"] and len(chains) == 3


@DTYPES
def test_without_a_measurement_half_types_are_multiplied_but_for_residuals(dtype: torch.dtype):
    artifact = check(Bottleneck().eval().to(dtype), torch.randn(2, 8, 6, 5).to(dtype))
    assert forms(artifact) == ((1, 1, 1) if dtype is torch.float16 else (2, 0, 0))


@DTYPES
@pytest.mark.parametrize("has_bias", [True, False])
def test_an_embedding_of_patches_is_a_product(dtype: torch.dtype, has_bias: bool):
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, (4, 2), stride=(4, 2), bias=has_bias)
            self.places = nn.Parameter(torch.randn(1, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.patches(x).flatten(2).transpose(1, 2) + self.places

    artifact = check(Embedding().eval().to(dtype), torch.randn(2, 3, 8, 8).to(dtype))
    assert forms(artifact) == (0, has_bias, 0)
    assert artifact.library.count(b"aten::matmul(") == (not has_bias)
    # The layout of the images changes when patches are extracted.
    kernels = [name for name in artifact.report["kernels"] if "transpose_reshape_transpose" in name]
    assert len(kernels) == 1


def test_relu_follows_a_product_of_patches_and_a_residual_does():
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 2, stride=2), nn.Conv2d(8, 8, 3, stride=3)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return F.relu(residual + self.second(F.relu(self.first(x))))

    artifact = check(Patches().eval(), torch.randn(2, 3, 12, 6), torch.randn(2, 8, 2, 1))
    assert forms(artifact) == (0, 1, 1)


def test_consecutive_products_do_not_copy():
    layers = nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.ReLU()
    artifact = check(nn.Sequential(*layers).eval().half(), torch.randn(1, 8, 4, 4).half())
    assert forms(artifact) == (0, 0, 2)
    assert not any(name.count("reshape") > 1 for name in artifact.report["kernels"])


def test_a_convolution_of_one_pixel_of_one_image_is_the_product_of_a_row():
    layers = nn.Conv2d(256, 256, 1), nn.SiLU(), nn.Conv2d(256, 256, 1), nn.ReLU()
    artifact = check(nn.Sequential(*layers).eval().half(), torch.randn(1, 256, 1, 1).half())
    assert b"aten::" not in artifact.library
    rows = [name for name in list(artifact.report["kernels"]) if "row_product" in name]
    assert len(rows) == 2 and "relu" in rows[0] + rows[1]


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 8, 2, stride=2),  # one row and column are in no window
        nn.Conv2d(4, 8, 3, stride=2),
        nn.Conv2d(4, 8, 2, stride=3),
        nn.Conv2d(4, 8, 1, stride=3),
        nn.Conv2d(4, 8, 3, stride=3, padding=3),
        nn.Conv2d(4, 8, 3, stride=3, groups=2),
        nn.Conv2d(4, 8, 3, stride=3, dilation=2),
    ],
    ids=str,
)
def test_windows_not_tiling_the_image_stay_convolutions(convolution: nn.Module):
    with choosing(Choices(measured=Fastest("product"))):
        artifact = check(nn.Sequential(convolution, nn.ReLU()).eval(), torch.randn(2, 4, 9, 9))
    assert forms(artifact) == (1, 0, 0)


def test_a_sum_of_float32_is_not_rounded_to_the_type_of_the_images():
    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4, 1, 1).half())
            self.bias = nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, self.weight) + self.bias

    artifact = check(Widened().eval(), torch.randn(2, 4, 3, 3).half())
    assert forms(artifact)[1:] == (0, 0)


def test_shared_convolution_is_computed_once():
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 6, 1)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            biased = self.first(x)
            other = self.second(biased)
            return [biased, F.relu(biased), other, F.relu(other)]

    artifact = check(Read().eval().half(), torch.randn(2, 4, 3, 3).half())
    assert forms(artifact) == (0, 2, 0)
