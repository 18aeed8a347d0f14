"""Attention with every kind of mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.programs import check, compiled

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


def test_bool_mask_with_a_row_that_sees_nothing(qkv: tuple[torch.Tensor, ...]):
    check(attention, *qkv, mask_with_an_empty_row())


def test_float_mask_with_a_row_that_sees_nothing(qkv: tuple[torch.Tensor, ...]):
    mask = mask_with_an_empty_row()
    check(attention, *qkv, torch.where(mask, torch.randn(2, 1, 8, 10), float("-inf")))


def test_constant_masks(qkv: tuple[torch.Tensor, ...]):
    lower = torch.ones(8, 10).tril()
    check(lambda q, k, v: attention(q, k, v, lower.bool()), *qkv)
    check(lambda q, k, v: attention(q, k, v, torch.where(lower > 0, 0.0, -1e9)), *qkv)


def test_a_mask_that_is_constantly_true_costs_nothing(qkv: tuple[torch.Tensor, ...]):
    masked = compiled(lambda q, k, v: attention(q, k, v, torch.ones(8, 10).bool()), *qkv)
    free = compiled(attention, *qkv)
    assert masked.report["kernels"] == free.report["kernels"]


def test_half_precision(qkv: tuple[torch.Tensor, ...]):
    check(attention, *(x.half() for x in qkv))


def test_layers_around_attention():
    x = torch.randn(2, 5, 32)
    check(nn.MultiheadAttention(32, 4, batch_first=True), x, x.clone(), x.clone())
    check(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), x)
