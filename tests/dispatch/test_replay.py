"""Gradients of a compiled call: eager runs it again for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch.nets import Scaled, X
from tvmify import tvmify as decorate


def test_weights_get_gradients() -> None:
    plain = Scaled().eval()
    fast: Any = decorate(plain, strict=True)
    result = fast(X)
    assert result.requires_grad
    assert fast.cache_info().builds == 1
    result.square().sum().backward()
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    plain.zero_grad()
    plain(X).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-4)


def test_gradients_reach_an_unreferenced_module() -> None:
    weight = nn.Parameter(torch.eye(4))

    def compiled() -> torch.Tensor:
        net = nn.Linear(4, 4, bias=False).eval()
        net.weight = weight
        return decorate(net, strict=True)(X)

    compiled().sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, X.sum(0).expand(4, 4), atol=1e-5)


def test_weights_changed_before_backward_are_an_error_as_in_eager() -> None:
    fast: Any = decorate(Scaled().eval())
    result = fast(X)
    with torch.no_grad():
        fast.linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_frozen_weights_give_plain_results() -> None:
    fast: Any = decorate(Scaled().eval().requires_grad_(False), strict=True)
    assert not fast(X).requires_grad
    fast.linear.weight.requires_grad_(True)
    assert fast(X).requires_grad
