"""Transposes that remain after images are channels last."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.compiler.programs import check


def _transposes(artifact):
    # Those fused with a reshape or packing belong to weights, in the pack function.
    return [n for n in artifact.report["kernels"] if n.startswith("transpose")]


class _Block(nn.Module):
    """A block of ConvNeXt: depthwise, norm and two products over channels, scale, residual."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 32), nn.Linear(32, channels)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


def test_transposes_of_a_convnext_cancel():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 4, 4), _Block(16), _Block(16), nn.Conv2d(16, 8, 2, 2))
    artifact = check(module, torch.randn(1, 3, 32, 32))
    assert len(_transposes(artifact)) == 1, artifact.report["kernels"]  # the result


def test_a_transpose_sinks_below_element_wise_operators_only():
    def program(x, y, bias):
        first = x.permute(0, 2, 3, 1).relu() * 2 + y.permute(0, 2, 3, 1)
        second = (first + bias).permute(0, 3, 1, 2)
        mixed = x.permute(0, 2, 3, 1) + y.permute(0, 3, 2, 1)
        return second, mixed, first.softmax(-1).permute(0, 3, 1, 2)

    artifact = check(
        program, torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(1, 1, 1, 3)
    )
    assert not any("unscheduled" in rule for rule in artifact.report["kernels"].values())


def test_lower_rank_operands_keep_their_axes():
    def program(x, scale, row):
        return (x * scale + row).permute(0, 2, 3, 1) / scale.reshape(3)

    check(program, torch.randn(2, 3, 4, 5), torch.rand(3, 1, 1) + 1, torch.randn(5))


def test_higher_rank_operands_keep_their_axes():
    for shape in ((2, 1, 1, 1, 1), (2, 1, 9, 8, 10), (2, 2, 1, 1, 1)):
        check(lambda x, y: x.transpose(1, 2) + y, torch.randn(1, 8, 9, 10), torch.randn(shape))


def test_resampling_keeps_channels_last():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d((5, 3)),
        nn.Conv2d(16, 8, 3),
    )
    artifact = check(module, torch.randn(1, 3, 9, 8))
    assert len(_transposes(artifact)) == 1, artifact.report["kernels"]  # the result
