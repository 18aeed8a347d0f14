"""Attention with every kind of mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.programs import Program, check, compiled, is_fused
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify

attention = F.scaled_dot_product_attention


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 4, 8, 16), torch.randn(2, 4, 10, 16), torch.randn(2, 4, 10, 16)


def mask_with_an_empty_row() -> torch.Tensor:
    mask = torch.rand(2, 1, 8, 10) > 0.3
    mask[0, 0, 3] = False
    return mask


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str
)
def test_options(qkv: tuple[torch.Tensor, ...], options: dict[str, Any]):
    q, k, v = qkv
    if options.get("enable_gqa"):
        k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
    check(lambda q, k, v: attention(q, k, v, **options), q, k, v)


@pytest.mark.parametrize(("keys", "values"), [(1, 2), (2, 1), (4, 2)])
def test_keys_and_values_of_different_numbers_of_heads(
    qkv: tuple[torch.Tensor, ...], keys: int, values: int
):
    q, k, v = qkv
    k, v = k[:, :keys].contiguous(), v[:, :values].contiguous()
    check(lambda q, k, v: attention(q, k, v, enable_gqa=True), q, k, v)


def test_bool_mask_with_a_fully_masked_row(qkv: tuple[torch.Tensor, ...]):
    check(attention, *qkv, mask_with_an_empty_row())


def test_float_mask_with_a_fully_masked_row(qkv: tuple[torch.Tensor, ...]):
    mask = mask_with_an_empty_row()
    check(attention, *qkv, torch.where(mask, torch.randn(2, 1, 8, 10), float("-inf")))


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys(qkv: tuple[torch.Tensor, ...], causal: bool):
    q, k, v = qkv
    check(lambda q, k, v: attention(q, k, v, is_causal=causal), q, k[:, :, :0], v[:, :, :0])


def test_constant_masks(qkv: tuple[torch.Tensor, ...]):
    lower = torch.ones(8, 10).tril()
    check(lambda q, k, v: attention(q, k, v, lower.bool()), *qkv)
    check(lambda q, k, v: attention(q, k, v, torch.where(lower > 0, 0.0, -1e9)), *qkv)


def test_all_true_mask_is_removed(qkv: tuple[torch.Tensor, ...]):
    masked = compiled(lambda q, k, v: attention(q, k, v, torch.ones(8, 10).bool()), *qkv)
    free = compiled(attention, *qkv)
    assert masked.report["kernels"] == free.report["kernels"]


def test_all_zero_mask_is_removed(qkv: tuple[torch.Tensor, ...]):
    masked = compiled(lambda q, k, v: attention(q, k, v, torch.zeros(8, 10)), *qkv)
    assert masked.report["kernels"] == compiled(attention, *qkv).report["kernels"]


def spelt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2) / 4 + mask).softmax(-1) @ v


def test_spelt_out_attention(qkv: tuple[torch.Tensor, ...]):
    mask = torch.where(mask_with_an_empty_row(), torch.randn(2, 1, 8, 10), float("-inf"))
    artifact = check(spelt, *qkv, mask)
    assert is_fused(artifact)
    assert "matmul" not in artifact.report["kernels"].values()


def test_returned_weights_are_computed(qkv: tuple[torch.Tensor, ...]):
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return weights, weights @ v

    artifact = check(program, *qkv)
    assert not is_fused(artifact)


def test_a_factor_after_the_mask_scales_the_mask(qkv: tuple[torch.Tensor, ...]):
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor):
        return ((q @ k.transpose(-1, -2) + mask) * 2).softmax(-1) @ v

    check(program, *qkv, torch.randn(8, 10))


def test_other_ranks():
    q, k, v = torch.randn(6, 5), torch.randn(7, 5), torch.randn(7, 5)
    check(attention, q, k, v, torch.randn(6, 7))
    check(attention, *(torch.randn(2, 3, 2, n, 5) for n in (6, 7, 7)), torch.randn(3, 1, 6, 7))


class SelfAttention(nn.Module):
    """As in most models: three projections, split into heads, which are swapped with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (p(x).view(2, 24, 4, 8).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.out(attention(*parts).transpose(1, 2).reshape(2, 24, 32))


def test_projections_are_one_product_without_copies():
    artifact = check(SelfAttention(), torch.randn(2, 24, 32))
    rules = [rule for name, rule in artifact.report["kernels"].items() if "pack" not in name]
    matmuls = [rule for rule in rules if rule == "matmul"]
    assert rules.count("attention") == 1
    assert len(matmuls) == 2


def test_half_precision(qkv: tuple[torch.Tensor, ...]):
    check(attention, *(x.half() for x in qkv))


def test_layers_around_attention():
    x = torch.randn(2, 5, 32)
    check(nn.MultiheadAttention(32, 4, batch_first=True), x, x.clone(), x.clone())
    check(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), x)


def test_heads_of_any_size_are_left_to_pytorch() -> None:
    """The kernels know the size of heads."""
    module = Program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2)
    fast = tvmify(module.eval(), dynamic=True, cache=False, strict=True)
    for length, size in ((8, 16), (5, 20)):
        qkv = [torch.randn(2, 3, length, size) for _ in range(3)]
        assert_close_to_reference(fast(*qkv), module, tuple(qkv))
    assert fast.cache_info().builds == 1
