"""Convolutions on a GPU that are computed as products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("inference")


def patches(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(3, 64, 4, stride=4), nn.ReLU(), nn.Conv2d(64, 32, 1), nn.ReLU()
    net = nn.Sequential(*layers).eval().to("cuda", dtype)
    return net, torch.randn(2, 3, 32, 32, device="cuda", dtype=dtype)


def test_products_match_convolutions(dtype: torch.dtype):
    net, x = patches(dtype)
    fast = tvmify.tvmify(net, strict=True)
    assert_close_to_reference(fast(x), net, (x,))


def test_relu_of_a_product_keeps_nan(dtype: torch.dtype):
    net, x = patches(dtype)
    fast = tvmify.tvmify(net, strict=True)
    fast(x)
    x[1, 0, 5, 6] = float("nan")
    missing = fast(x).isnan()
    assert missing.any() and torch.equal(missing, net(x).isnan())
