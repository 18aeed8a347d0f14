"""Convolutions, pooling, resampling, normalization, products."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.programs import (
    Program,
    check,
    check_each,
    check_values,
    executed,
    with_specials,
)
from tests.models import trained


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": (3, 5), "padding": (1, 2)},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "groups": 2},
        {"kernel_size": 3, "groups": 8, "bias": False},
        {"kernel_size": 5, "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_convolutions(options: dict[str, Any]):
    check(nn.Conv2d(8, 16, **options), torch.randn(2, 8, 12, 13))


def test_convolutions_of_other_ranks():
    check(nn.Conv1d(8, 16, 3, padding=1, groups=2), torch.randn(2, 8, 20))
    check(nn.Conv3d(4, 8, 3, padding=1), torch.randn(1, 4, 6, 6, 6))
    check(nn.Conv2d(8, 5, 3), torch.randn(8, 9, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_convolutions_of_other_dtypes(dtype: torch.dtype):
    check(nn.Conv2d(8, 16, 3).to(dtype), torch.randn(1, 8, 9, 9, dtype=dtype))


def test_a_convolution_with_a_computed_kernel():
    check(lambda x, w: F.conv2d(x, w * 2), torch.randn(1, 8, 9, 9), torch.randn(4, 8, 3, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
        {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 2},
        {"kernel_size": 3, "padding": 1, "dilation": 2},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 2, "padding": 2},
    ],
    ids=str,
)
def test_transposed_convolutions(options: dict[str, Any]):
    check(nn.ConvTranspose2d(8, 6, **options), torch.randn(1, 8, 7, 7))


def test_transposed_convolutions_of_other_ranks():
    check(nn.ConvTranspose1d(8, 6, 4, 2, 1), torch.randn(1, 8, 10))
    check(nn.ConvTranspose3d(4, 6, 3, 2, 1), torch.randn(1, 4, 5, 5, 5))


def test_batch_norm_is_folded_into_the_convolution():
    module = trained(
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
    )
    artifact = check(module, torch.randn(1, 8, 12, 12))
    assert not any("multiply" in name for name in _kernels_of_main(artifact.report["kernels"]))


def _kernels_of_main(kernels: dict[str, str]) -> list[str]:
    return [name for name, rule in kernels.items() if rule.startswith(("conv2d", "matmul"))]


class ChannelsLastNorm(nn.Module):
    """A layer norm over channels between convolutions, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x).permute(0, 2, 3, 1))
        return self.second(y.permute(0, 3, 1, 2))


def test_inverse_transposes_cancel():
    artifact = check(ChannelsLastNorm(), torch.randn(1, 8, 9, 9))
    # The remaining ones: one for the input and one for the result.
    names = [name for name in artifact.report["kernels"] if name.startswith("transpose")]
    assert len(names) == 2
    assert "fused_conv2d_add" in artifact.report["kernels"]


def test_batch_norm_where_it_cannot_be_folded():
    check(
        trained(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8))),
        torch.randn(1, 8, 9, 9),
    )
    check(trained(nn.BatchNorm1d(8, affine=False)), torch.randn(4, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": (2, 3), "stride": (1, 2), "dilation": 2},
    ],
    ids=str,
)
def test_max_pooling_keeps_specials(options: dict[str, Any]):
    x = with_specials(1, 4, 12, 12)
    x[0, 1] = float("-inf")
    check(nn.MaxPool2d(**options), x)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "padding": 1, "count_include_pad": False},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        {"kernel_size": 2, "divisor_override": 3},
    ],
    ids=str,
)
def test_average_pooling(options: dict[str, Any]):
    check(nn.AvgPool2d(**options), torch.randn(1, 8, 12, 12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)], ids=repr)
def test_pooling_among_convolutions_of_other_dtypes(pool: nn.Module, dtype: torch.dtype):
    # Images are channels last there, and TVM's own pools are not used for them.
    module = nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Conv2d(8, 5, 1)).to(dtype)
    x = torch.randn(1, 3, 14, 14).to(dtype)
    hole = x.clone()
    hole[0, 0, 4, 4] = float("nan")
    # On some processors eager's bfloat16 convolution spreads a NaN beyond its window.
    artifact = check(module, x if dtype is torch.bfloat16 else hole)
    assert "pooling" in artifact.report["kernels"].values()
    expected = copy.deepcopy(module).double()(hole.double())
    assert torch.equal(executed(artifact, module, hole).isnan(), expected.isnan())


def test_pooling_of_other_ranks_and_sizes():
    check(nn.Sequential(nn.MaxPool1d(3, 2), nn.AvgPool1d(3, 2, 1)), torch.randn(2, 4, 21))
    check(nn.Sequential(nn.MaxPool3d(2), nn.AvgPool3d(2)), with_specials(1, 2, 8, 8, 8))
    check_each(
        {str(size): nn.AdaptiveAvgPool2d(size) for size in (1, 5, (7, 3))},
        torch.randn(1, 8, 12, 12),
    )
    check_each(
        {
            "transposed sequence": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
            "three of a line": lambda x: F.adaptive_avg_pool1d(x, 3),
            "channels last": lambda x: F.adaptive_avg_pool2d(x[:, None].permute(0, 3, 1, 2), 1),
        },
        torch.randn(2, 12, 8),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 2, "mode": "nearest"},
        {"size": (5, 17), "mode": "nearest"},
        {"scale_factor": 2, "mode": "bilinear"},
        {"scale_factor": 2.3, "mode": "bilinear"},
        {"size": (7, 9), "mode": "bilinear", "align_corners": True},
        {"size": (20, 9), "mode": "bicubic"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_resampling(options: dict[str, Any], dtype: torch.dtype):
    check(lambda x: F.interpolate(x, **options), torch.randn(1, 8, 12, 12, dtype=dtype))


def test_adaptive_pooling_in_float64():
    check(nn.AdaptiveAvgPool2d((5, 7)), torch.randn(1, 8, 12, 12, dtype=torch.float64))


def test_normalization():
    for module in (
        nn.LayerNorm(16),
        nn.LayerNorm((5, 16), elementwise_affine=False),
        nn.LayerNorm(16, bias=False),
        nn.RMSNorm(16),
        nn.GroupNorm(1, 5),
    ):
        check(module, torch.randn(2, 5, 16) + 3)
    check(nn.LayerNorm(16).half(), torch.randn(2, 16).half())


@pytest.mark.parametrize(
    ("norm", "batch"),
    [
        (nn.GroupNorm(4, 8), 1),
        (nn.GroupNorm(4, 8), 2),
        (nn.GroupNorm(1, 8, affine=False), 2),
        (nn.GroupNorm(8, 8), 1),
        (nn.InstanceNorm2d(8, affine=True), 2),
        (nn.InstanceNorm2d(8), 1),
        (nn.InstanceNorm2d(8), 2),
    ],
    ids=str,
)
def test_normalization_of_images(norm: nn.Module, batch: int):
    x = torch.randn(batch, 8, 6, 40) * 3 + 2
    artifact = check(norm, x)
    check(nn.Sequential(nn.Conv2d(8, 8, 3), norm, nn.SiLU(), nn.Conv2d(8, 8, 1)), x)
    for special in (float("nan"), float("inf")):
        x[0, 1, 2, 3] = special
        check_values(artifact, norm, x)
    if batch > 1:
        check(norm.double(), x.double())
        norm.float()


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 8), nn.InstanceNorm3d(8, affine=True)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_normalization_of_volumes(norm: nn.Module, batch: int):
    x = torch.randn(batch, 8, 5, 6, 7) * 3 + 2
    check(norm, x)
    check(nn.Sequential(nn.Conv3d(8, 8, 3), norm, nn.SiLU(), nn.Conv3d(8, 8, 1)), x)
    check(norm, x[:, :, :1])


def test_images_are_normalized_in_the_layout_of_convolutions():
    """With channels last, a channel is not contiguous in memory."""
    norm = nn.InstanceNorm2d(16)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Conv2d(16, 16, 3), norm)
    rules = check(net, torch.randn(1, 3, 12, 12)).report["kernels"]
    assert "column reduction" in rules.values()
    moved = [name for name in rules if re.fullmatch(r"(fused_)?transpose\d*(_reshape\d*)?", name)]
    assert moved == []


def test_products():
    check_each(
        {
            "mm": lambda x, y: x[0] @ y[0],
            "bmm": torch.bmm,
            "broadcast": lambda x, y: x[:, None] @ y[0],
            "vector": lambda x, y: (x[0] @ y[0, :, 0], y[0, :, 0] @ y, x[0, 0] @ y[0, :, 0]),
            "addmm": lambda x, y: torch.addmm(y[0, 0], x[0], y[0], alpha=0.5, beta=2),
            "einsum": lambda x, y: torch.einsum("bij,bjk->bki", x, y),
            "tensordot": lambda x, y: torch.tensordot(x, y[0], 1),
            "of one constant": lambda x, y: [torch.eye(7, dtype=y.dtype) @ part for part in y],
            "integers": lambda x, y: (x[0] * 9).int() @ (y[0] * 9).int(),
            "double": lambda x, y: x.double() @ y.double(),
        },
        torch.randn(2, 5, 7),
        torch.randn(2, 7, 3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_linear_layers(dtype: torch.dtype):
    check(nn.Linear(64, 48).to(dtype), torch.randn(3, 64, dtype=dtype))


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")
def test_recurrent_layers():
    check(nn.LSTM(8, 16), torch.randn(3, 2, 8))
    check(nn.GRU(8, 16, batch_first=True), torch.randn(2, 3, 8))


def test_volumes():
    window = {"stride": (2, 1, 2), "padding": (2, 0, 1), "dilation": (2, 1, 1), "groups": 2}
    check(nn.Conv3d(8, 8, (3, 1, 2), **window), torch.randn(2, 8, 9, 6, 6))
    check(nn.Conv3d(8, 16, 1), torch.randn(2, 8, 5, 6, 6))
    x = torch.randn(2, 8, 3, 4, 4)
    check(nn.ConvTranspose3d(8, 6, 2, stride=2), x)
    check(nn.ConvTranspose3d(8, 6, 3, stride=2, padding=1, output_padding=1), x)


def test_depthwise_volumes_are_one_kernel_each():
    """With and without padding along each axis, at every stride; channels fill no vector."""
    whole = nn.Conv3d(20, 20, 3, padding=1, groups=20)
    strided = nn.Conv3d(20, 20, (3, 2, 3), (2, 1, 2), (2, 0, 1), (2, 1, 1), groups=20)
    along_depth = nn.Conv3d(20, 20, (5, 1, 1), padding=(2, 0, 0), groups=20, bias=False)
    inside = nn.Conv3d(20, 20, (2, 3, 3), groups=20)
    artifact = check(
        nn.Sequential(whole, nn.SiLU(), strided, along_depth, nn.ReLU(), inside),
        torch.randn(2, 20, 5, 9, 8),
    )
    assert list(artifact.report["kernels"].values()).count("depthwise") == 4


def test_a_volume_that_is_not_finite_affects_its_neighbours_alone():
    x = torch.randn(1, 4, 6, 5, 5)
    x[0, 1, 2, 2, 2], x[0, 2, 5, 0, 0] = float("inf"), float("nan")
    check(nn.Conv3d(4, 4, 3, padding=1, groups=4), x)
    check(nn.Conv3d(4, 8, 3, padding=1), x)


def test_a_gate_over_an_image_is_a_product():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))

    rules = check(Gated(), torch.randn(1, 16, 9, 9)).report["kernels"].values()
    assert "matmul" in rules


@pytest.mark.parametrize(
    ("conv", "shape", "pads"),
    [
        (nn.Conv2d(8, 16, 3, 2), (2, 8, 12, 13), (0, 1, 0, 1)),
        (nn.Conv2d(8, 16, 3, padding=1), (1, 8, 12, 13), (3, 0, 1, 2)),
        (nn.Conv2d(8, 16, 3), (1, 8, 12, 13), (2, 1)),
        (nn.Conv2d(8, 8, 5, 2, groups=8), (1, 8, 12, 13), (1, 2, 1, 2)),
        (nn.Conv2d(8, 16, 1), (1, 8, 12, 13), (1, 0, 0, 1)),
        (nn.Conv1d(8, 16, 3, dilation=4), (2, 8, 40), (8, 0)),
        (nn.Conv3d(4, 8, 3), (1, 4, 6, 7, 8), (0, 1, 1, 0, 2, 0)),
    ],
    ids=str,
)
def test_zeros_around_images_are_padding(conv: nn.Module, shape: tuple[int, ...], pads: Any):
    padded = nn.Sequential(nn.ReLU(), Program(lambda x: F.pad(x, pads)), conv)
    artifact = check(padded, torch.randn(shape))
    assert not [name for name in artifact.report["kernels"] if "padded" in name]


@pytest.mark.parametrize(
    ("pads", "value"),
    [((1, 1, 1, 1), 0.5), ((-1, 2, 0, 1), 0.0), ((1, 1, 1, 1, 0, 2), 0.0), ((1, 1), float("nan"))],
    ids=str,
)
def test_other_pads_before_convolutions(pads: tuple[int, ...], value: float):
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, pads, value=value), weight)

    channels = 8 + sum(pads[4:])
    check(program, torch.randn(2, 8, 9, 9), torch.randn(4, channels, 3, 3))


def test_pad_with_other_consumers():
    def program(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.pad(x, (0, 1, 0, 1))
        return F.conv2d(x, weight), x * 2

    check(program, torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))
