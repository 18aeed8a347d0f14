"""Custom operators that write to their arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tvmify import tvmify


@torch.library.custom_op("tvmify_tests::scale_", mutates_args=("x",))
def scale(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("tvmify_tests::count", mutates_args=("calls",))
def count(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    calls.add_(1)
    return x + calls


@count.register_fake
def _(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Scales(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        torch.ops.tvmify_tests.scale_(y[:, 1:3], 2.0)
        torch.ops.tvmify_tests.scale_(y.t(), 3.0)
        torch.ops.tvmify_tests.scale_(x, 0.5)
        return (y + x).tanh()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tvmify_tests.count(x.exp(), self.calls).tanh()


@pytest.mark.parametrize("model", [Scales, Counts])
def test_writes_of_custom_operators_are_seen(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net, eager = tvmify(model().eval(), strict=True), model().eval()
    with torch.no_grad():
        for rows in (3, 5, 7):
            x = torch.randn(rows, 4)
            given, expected = x.clone(), x.clone()
            torch.testing.assert_close(net(given), eager(expected))
            torch.testing.assert_close(given, expected)
    assert net.cache_info().eager == 0
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))
