"""Attention on a GPU, by whichever library PyTorch chooses, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tvmify
from tests.tolerances import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("inference")

DEVICE = "cuda"


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask)


def by_others(*args: Any) -> torch.Tensor:
    """Compute attention without cuDNN, which is wrong in these cases with PyTorch 2.11."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return attention(*args)


def computed(dtype: torch.dtype, mask: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return a result and its arguments."""
    operands = torch.randn(3, 2, 4, 64, 64, device=DEVICE).to(dtype).unbind()
    fast: Any = tvmify.tvmify(attention, strict=True)
    return fast(*operands, mask), (*operands, mask)


def test_fully_masked_rows(dtype: torch.dtype):
    seen = torch.rand(2, 1, 64, 64, device=DEVICE) > 0.3
    seen[0, 0, 3] = False
    result, given = computed(dtype, seen)

    def visible(result: torch.Tensor) -> torch.Tensor:
        return torch.where(seen.any(-1, keepdim=True), result, 0.0)

    assert_close_to_reference(visible(result), lambda *x: visible(by_others(*x)), given)
    hidden = result[0, :, 3]  # libraries differ here: zero or NaN
    assert bool((hidden.isnan() | (hidden == 0)).all())


def test_masks_of_float32_beside_queries_of_any_type(dtype: torch.dtype):
    result, given = computed(dtype, torch.randn(2, 1, 64, 64, device=DEVICE))
    assert_close_to_reference(result, by_others, given)
