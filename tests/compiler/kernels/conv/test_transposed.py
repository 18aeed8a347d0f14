"""Transposed convolutions: strides, overlaps, cropping, one and three dimensions, groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compiler.programs import check


def _transposed(dimensions, *args, **options):
    torch.manual_seed(0)
    return (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1](
        *args, **options
    )


def _rules(artifact):
    kernels = artifact.report["kernels"]
    return {rule for name, rule in kernels.items() if "pack" not in name}


@pytest.mark.parametrize(
    ("shape", "arguments", "options"),
    [
        ((2, 6, 5, 7), (6, 9, 2), {"stride": 2}),
        ((1, 5, 6, 4), (5, 7, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((1, 5, 6, 4), (5, 3, 4), {"stride": 2, "padding": 1, "bias": False}),
        ((1, 4, 5, 3), (4, 6, (3, 2)), {"stride": (1, 3), "padding": (1, 0)}),
        ((1, 3, 6, 6), (3, 4, 2), {"stride": 3, "output_padding": 2}),
        ((1, 3, 6, 6), (3, 4, 2), {"stride": 1, "padding": 1}),
        ((1, 3, 6, 6), (3, 4, 2), {"stride": 2, "padding": 3}),
        ((1, 3, 6, 5), (3, 4, 5), {"stride": (3, 2), "padding": (0, 4)}),
        ((1, 3, 6, 5), (3, 4, (1, 3)), {"stride": (2, 1)}),
        ((1, 3, 1, 2), (3, 4, 3), {"stride": 2, "padding": 1}),
        ((1, 3, 1, 1), (3, 4, 1), {"stride": 3, "padding": 1, "output_padding": 2}),
    ],
)
def test_image(shape, arguments, options):
    artifact = check(_transposed(2, *arguments, **options), torch.randn(shape))
    assert not any("failed" in rule for rule in _rules(artifact))


def test_line():
    check(_transposed(1, 6, 4, 8, stride=4, padding=2), torch.randn(2, 6, 9))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_grouped_and_dilated(dimensions):
    module = _transposed(dimensions, 4, 6, 3, stride=2, dilation=2, groups=2, output_padding=1)
    check(module, torch.randn(1, 4, *[4] * dimensions))


def test_kernel_as_large_as_its_stride_is_a_matrix_product():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(8, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)

        def forward(self, x):
            return torch.cat([x, self.up(self.down(x)).relu()], 1)

    artifact = check(Up(), torch.randn(1, 8, 8, 8))
    kernels = {n: r for n, r in artifact.report["kernels"].items() if "pack" not in n}
    assert "matmul" in kernels.values()
    # Placed, shifted by the bias, activated and concatenated in one pass.
    assert any("conv2d_transpose_add" in n and "concatenate" in n for n in kernels), kernels
