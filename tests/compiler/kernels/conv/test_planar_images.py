"""Convolutions of photographs, whose few channels stay planes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from tvm import relax
from tvm.ir import assert_structural_equal

from tests.compiler.programs import check
from tvmify.artifact import Artifact
from tvmify.compiler.kernels.conv.planar_images import PlanarImages


class _Means(nn.Module):
    """The mean of each channel of a convolution, so that the result needs no transpose."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, image: Tensor) -> Tensor:
        return self.layer(image).relu().mean((2, 3))


def _transposed(artifact: Artifact) -> int:
    # Transposes of weights are fused with their packing.
    return sum(name.startswith("transpose") for name in artifact.report["kernels"])


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((1, 3, 64, 64), nn.Conv2d(3, 32, 7, 2, 3)),
        ((1, 3, 61, 47), nn.Conv2d(3, 32, 3, 2, 1)),
        ((2, 1, 30, 90), nn.Conv2d(1, 24, (5, 3), (1, 2), (2, 0))),
        ((1, 4, 40, 40), nn.Conv2d(4, 10, 3, padding=2, dilation=2)),
        ((3, 2, 9, 11), nn.Conv2d(2, 16, 3, padding=1)),  # no piece of a row fills a vector
        ((1, 3, 48, 48), nn.Conv2d(3, 64, 16, 16)),
        ((1, 3, 1, 40), nn.Conv2d(3, 16, (1, 9), padding=(0, 4))),
    ],
    ids=str,
)
def test_planar_images_are_not_transposed(shape: tuple[int, ...], layer: nn.Conv2d):
    artifact = check(_Means(layer), torch.randn(shape))
    assert "conv2d" in artifact.report["kernels"].values(), artifact.report
    assert _transposed(artifact) == 0, artifact.report


def test_non_finite_values():
    x = torch.randn(1, 3, 32, 32)
    x[0, 0, 0, 0], x[0, 2, 31, 7], x[0, 1, 9, 31] = float("nan"), float("inf"), -float("inf")
    check(nn.Conv2d(3, 16, 3, padding=1), x)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(5, 16, 3, padding=1),
        nn.Conv2d(3, 16, 1),
        nn.Conv2d(4, 16, 3, groups=2),
        nn.Conv2d(3, 3, 3, groups=3),
        nn.Conv2d(1, 1, 3, padding=1),
    ],
    ids=str,
)
def test_other_images_are_transposed(layer: nn.Conv2d):
    artifact = check(_Means(layer), torch.randn(1, layer.in_channels, 40, 40))
    assert _transposed(artifact) == 1, artifact.report


class _Both(nn.Module):
    """An image that a convolution reads, and another operator reads channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.linear = nn.Linear(3, 16)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        return self.convolution(image).mean((2, 3)), self.linear(image.permute(0, 2, 3, 1))


def test_another_reader_of_the_turned_image_keeps_it():
    check(_Both(), torch.randn(1, 3, 20, 20))


def test_an_image_with_all_axes_reversed_stays():
    x = relax.Var("x", relax.TensorType([3, 20, 20, 1], "float32"))
    weight = relax.Var("w", relax.TensorType([8, 3, 3, 3], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, weight], {"num_input": 1}):
        with builder.dataflow():
            image = builder.emit(relax.op.permute_dims(x))
            out = relax.op.nn.conv2d(image, weight, data_layout="NHWC", kernel_layout="OHWI")
            result = builder.emit_output(out)
        builder.emit_func_output(result)
    before = builder.get()
    assert_structural_equal(PlanarImages()(before), before)
