"""Code that checks whether two arguments are the same tensor gets eager's answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tvmify import tvmify
from tvmify.capture import may_ask_for_identity


class Scripted(nn.Module):
    def forward(self, x, y):
        if x is y:
            return x * 2
        return x + y + 1


class Recorded(nn.Module):
    def forward(self, x, **others):
        return {"sum": x + others["b"] + (1 if x is others["b"] else 0)}


class Never(nn.Module):
    def forward(self, x, y=None):
        return x if y is None else x * y


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v, **options):
        return self.layer(q, k, v, **options)


@pytest.mark.parametrize("make", [Scripted, Recorded])
def test_each_aliasing_pattern_is_specialized(make: type[nn.Module]) -> None:
    plain = make().eval()
    net = tvmify(plain, cache=False, compare=False, strict=True)
    x, y = torch.randn(3), torch.randn(3)
    for a, b in [(x, x), (x, y), (y, y), (x, x.clone())] * 2:
        with torch.inference_mode():
            want = plain(a, b) if make is Scripted else plain(a, b=b)["sum"]
            got = net(a, b) if make is Scripted else net(a, b=b)["sum"]
        torch.testing.assert_close(got, want)
    assert net.cache_info().builds == 2


@pytest.mark.parametrize("wrap", [lambda layer: layer, Around])
def test_self_attention_follows_the_path_of_eager(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = wrap(nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    net = tvmify(plain, cache=False, compare=False, strict=True)
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = True  # such rows are NaN on the fast path, but for self-attention only
    options = {"key_padding_mask": padding, "need_weights": False}
    with torch.inference_mode():
        for args in (x, x, x), (x, y, y), (x, x.clone(), x):
            got, want = net(*args, **options)[0], plain(*args, **options)[0]
            torch.testing.assert_close(got, want, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_identity_is_ignored_unless_queried() -> None:
    net = tvmify(Never().eval(), cache=False, compare=False, strict=True)
    x, y = torch.randn(3), torch.randn(3)
    with torch.inference_mode():
        torch.testing.assert_close(net(x, x), x * x)
        torch.testing.assert_close(net(x, y), x * y)
    assert net.cache_info().builds == 1
    assert not may_ask_for_identity(Never())
