"""The bridged parts of programs for GPUs, run on the CPU: graphs, views and layouts are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.gpu_programs import Kernels, check
from tests.compiler.nets import Bags, Block, Residual
from tvmify.compiler.kernels.common.choice import Choices, choosing

attention = F.scaled_dot_product_attention


def test_convolutions_with_epilogues():
    artifact = check(Residual().eval(), torch.randn(2, 3, 16, 16))
    assert artifact.library.count(b"aten::convolution") == 2


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=(1, 0), dilation=(1, 2)),
        nn.Conv2d(4, 6, 4, padding="same"),  # one more row and column of padding after than before
        nn.Conv2d(4, 8, (1, 3), groups=4, padding=(0, 1)),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
    ],
    ids=str,
)
def test_every_convolution(convolution: nn.Module):
    artifact = check(nn.Sequential(convolution, nn.ReLU()).eval(), torch.randn(2, 4, 9, 8))
    assert b"aten::convolution" in artifact.library


def test_lines_and_volumes():
    check(nn.Conv1d(4, 6, 3, padding=1).eval(), torch.randn(2, 4, 9))
    check(nn.Conv3d(2, 3, 3, padding=1).eval(), torch.randn(1, 2, 4, 5, 6))


@pytest.mark.parametrize("shared", [False, True])
def test_a_transformer(shared: bool):
    mask = torch.rand(2, 1, 1 if shared else 6, 6) > 0.3
    mask[..., 0] = True
    artifact = check(Block().eval(), torch.randn(2, 6, 32), mask)
    assert b"aten::matmul" not in artifact.library


def test_half_types_are_not_widened():
    x = torch.randn(2, 6, 32).half()
    artifact = check(Block().eval().half(), x, torch.zeros(2, 1, 6, 6).half())
    assert b"Half(2, 6, 64" in artifact.library


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str
)
def test_attention(options: dict[str, Any]):
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, heads, 10, 16), torch.randn(2, heads, 10, 16)
    check(lambda q, k, v: attention(q, k, v, **options), q, k, v)


def test_padding_beside_a_causal_mask():
    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    seen = torch.rand(2, 1, 1, 8) > 0.3
    lower = torch.ones(8, 8).tril().bool()
    check(lambda q, k, v, seen: attention(q, k, v, lower & seen), q, k, v, seen)


def test_operands_sharing_a_tensor():
    def split(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(16, -1)
        q, k, v = (part.reshape(2, 6, 4, 4).transpose(1, 2) for part in parts)
        return attention(q, k, v)

    check(split, torch.randn(2, 6, 48))


def test_fully_masked_rows_match_eager():
    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    mask = torch.rand(2, 1, 8, 8) > 0.3
    mask[0, 0, 3] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))

    def spelt(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = q @ k.transpose(-1, -2) / 4
        scores = scores.where(mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        return torch.softmax(scores, -1) @ v

    for function in (attention, spelt):
        check(function, q, k, v, mask)
        check(function, q, k, v, added)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masks_of_float32_beside_half_queries(dtype: torch.dtype):
    q, k, v = torch.randn(3, 2, 4, 8, 16).to(dtype).unbind()
    check(attention, q, k, v, torch.randn(2, 1, 8, 8))


def test_layers_share_a_mask_of_another_type():
    def layers(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attention(attention(q, k, v, mask), k, v, mask)

    q, k, v = torch.randn(3, 2, 4, 8, 16).half().unbind()
    artifact = check(layers, q, k, v, torch.randn(2, 1, 8, 8))
    assert [name for name in artifact.report["kernels"] if "cast" in name] == ["cast"]


@pytest.mark.parametrize("fill", [float("-inf"), -1e4])
def test_filled_scores(fill: float):
    def spelt(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(hidden, fill)
        return torch.softmax(scores, -1) @ v

    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    hidden = torch.rand(2, 1, 1, 8) > 0.7
    hidden[0] = True
    k[1, :, 3] = float("nan")
    hidden[1, ..., 3] = True
    check(spelt, q, k, v, hidden)


def test_products():
    def products(x: Any, y: Any, row: Any, bias: Any) -> list[Any]:
        both = x @ y
        return [
            x.mT @ x,
            x @ row,
            row @ row,
            y.mT @ x.mT + bias,
            both + bias[:3],
            both * both + bias[:3],
            torch.addmm(bias, y.mT, x[0].mT, beta=0.5, alpha=2.0),
            (x * 3).long() @ (y * 3).long(),
        ]

    check(products, torch.randn(2, 5, 4), torch.randn(4, 3), torch.randn(4), torch.randn(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms_and_softmax(dtype: torch.dtype):
    def norms(x: Any, scale: Any, shift: Any) -> list[Any]:
        return [
            F.layer_norm(x, (4, 6), scale, shift, eps=0.1),
            F.layer_norm(x, (6,)),
            F.group_norm(x, 2),
            x.softmax(1) + F.log_softmax(x, -1),
            (x.float() * 2).softmax(0),
        ]

    x, scale, shift = (torch.randn(*shape).to(dtype) for shape in ((3, 4, 6), (4, 6), (4, 6)))
    artifact = check(norms, x, scale, shift)
    assert artifact.library.count(b"aten::layer_norm") == 2
    if dtype is torch.float16:
        assert b"Half(3, 4, 6" in artifact.library  # eager's kernel has the casts inside


def test_consecutive_reshapes_do_not_copy():
    def reshaped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.mT @ x).reshape(3, 2, 6).reshape(12, 3) @ y

    artifact = check(reshaped, torch.randn(5, 6), torch.randn(3, 4))
    assert not any("fused" in name for name in artifact.report["kernels"])


def test_reshapes_of_empty_tensors():
    def reshaped(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        return [x.exp().reshape(3, 0).reshape(0, 5), (x.T @ y).view(1, 5, 4).view(2, 10) + 1]

    check(reshaped, torch.randn(0, 5), torch.randn(0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_epilogue_behind_a_reshape_joins_the_row_product(dtype: torch.dtype):
    class Lengthened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(200, 120, dtype=dtype))
            self.bias = nn.Parameter(torch.randn(120, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            widened = torch.addmm(self.bias, x.view(-1, 200), self.weight)
            return F.gelu(widened.view(1, 1, 120)) + x[..., :120]

    with choosing(Choices(measured=Kernels())):
        artifact = check(Lengthened().eval(), torch.randn(1, 1, 200, dtype=dtype))
    names = artifact.report["kernels"]
    assert any("row_product" in name and "gelu" in name for name in names), names


def test_reshapes_of_products_that_are_not_moved():
    def reshaped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[Any]:
        row = torch.addmm(bias, x, weight)
        scalar = (x @ weight[:, :1]).view(()) * 2
        whole = (x.long() @ weight.long()).view(1, 1, 6) * 2
        widened = (x @ weight[:, :1] + bias).view(1, 1, 6) * 2
        batched = (x[None] @ weight[None]).view(1, 6) * 2
        return [row.view(1, 1, 6) * 2, row, row.view(2, 3) * 2, scalar, whole, widened, batched]

    check(reshaped, torch.randn(1, 40), torch.randn(40, 6), torch.randn(6))
    check(lambda x, y: (x.T @ y).view(1, 1, 6) * 2, torch.randn(40, 1), torch.randn(40, 6))
    check(lambda x, y: (x @ y).view(2, 2, 6) * 2, torch.randn(4, 40), torch.randn(40, 6))


def test_results_with_other_readers_are_materialized():
    def both(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[Any]:
        product = x @ weight
        sum_ = product + bias
        reshaped = sum_.view(2, 2, 3).view(3, 4)
        return [product, sum_, reshaped, reshaped.view(12)]

    artifact = check(both, torch.randn(4, 5), torch.randn(5, 3), torch.randn(3))
    assert not any("matmul" in name for name in artifact.report["kernels"])


def test_product_read_twice_is_computed_once():
    def residual(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        product = x @ weight
        return (product + bias) * product

    artifact = check(residual, torch.randn(3, 4), torch.randn(4, 5), torch.randn(5))
    assert artifact.library.count(b"aten::matmul") == 1
    assert artifact.library.count(b"aten::linear") == 0


def test_loops_without_gpu_kernels_are_left_to_pytorch():
    check(Bags().eval(), torch.randint(20, (3, 5)))
    artifact = check(nn.LSTM(6, 4, batch_first=True).eval(), torch.randn(2, 5, 6))
    assert artifact.report["bridged"] == {"aten.lstm.input": 1}
    artifact = check(lambda x: x.cumsum(1), torch.randn(2, 5, 6))
    assert artifact.report["bridged"] == {"aten.cumsum.default": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_times_weights_are_summed_in_float32(dtype: torch.dtype):
    layers = nn.Linear(300, 200), nn.SiLU(), nn.Linear(200, 96, bias=False)
    net, x = nn.Sequential(*layers).eval().to(dtype), torch.randn(1, 1, 300).to(dtype)
    with choosing(Choices(measured=Kernels())):
        artifact = check(net, x)
    assert b"aten::" not in artifact.library
    assert any("row_product" in name for name in artifact.report["kernels"])


def test_projections_are_one_product_and_masks_are_converted_once():
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            for layer in range(2):
                q, k, v = (
                    project(x).view(2, 6, 4, 8).transpose(1, 2)
                    for project in self.projections[3 * layer : 3 * layer + 3]
                )
                x = x + attention(q, k, v, seen).transpose(1, 2).reshape(2, 6, 32)
            return x

    seen = torch.rand(2, 1, 1, 6) > 0.3
    seen[..., 0] = True
    artifact = check(Layers().eval(), torch.randn(2, 6, 32), seen)
    assert b"Float(2, 6, 96" in artifact.library and b"Float(2, 6, 32" not in artifact.library
    assert sum("where" in name for name in artifact.report["kernels"]) == 1
    assert b"Bool(" not in artifact.library  # no call of PyTorch takes the mask itself
