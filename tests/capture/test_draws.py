"""Programs that draw random numbers draw the same as eager PyTorch, or run in eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tvmify import tvmify
from tvmify.capture.draws import may_draw


class Net(nn.Module):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("noise", torch.zeros(6, 4))
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


def dropout(net, x):
    return F.dropout(x * net.w, 0.5, True)


def unread_first(net, x):
    torch.rand(3)
    F.dropout(x, 0.5, True)
    return x * net.w + torch.rand(6, 4)


def unread_only(net, x):
    F.dropout(x, 0.5, True)
    return x * net.w


def several(net, x):
    y = x[torch.randperm(6)] * net.w + torch.randint(0, 9, (6, 4))
    return y + torch.randn_like(x) + torch.bernoulli(torch.sigmoid(x))


def normal(net, x):
    return torch.empty(6, 4).normal_() + x * net.w + torch.normal(0.0, 1.0, (6, 4))


def gumbel(net, x):
    return F.gumbel_softmax(x * net.w)


def attention(net, x):
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5) * net.w


def rrelu(net, x):
    return F.rrelu(x * net.w, training=True)


def written(net, x):
    net.noise.normal_()
    return x * net.w + net.noise


def quiet(net, x):
    return F.dropout(x * net.w, 0.5, net.training)


def stream(net: Net, module: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Return two results, the gradients of the second, and numbers drawn afterwards."""
    net.zero_grad()
    torch.manual_seed(3)
    results = [module(x), module(x)]
    if results[1].requires_grad:
        results[1].sum().backward()
        assert net.w.grad is not None
        results.append(net.w.grad.clone())
    return [*(result.detach().clone() for result in results), torch.rand(1)]


@pytest.mark.parametrize(
    ("compute", "compiled", "with_gradients"),
    [
        (dropout, True, False),
        (unread_first, True, False),
        (unread_only, False, False),
        (several, True, False),
        (normal, True, False),
        (gumbel, True, False),
        (attention, True, False),
        (rrelu, True, False),
        (written, False, False),
        (quiet, True, True),
    ],
)
def test_draws_match_eager(compute, compiled: bool, with_gradients: bool) -> None:
    net = Net(compute).eval()
    fast = tvmify(net, cache=False, compare=False)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode, runs_compiled in ((torch.no_grad, compiled), (torch.enable_grad, with_gradients)):
            with mode():
                expected, got = stream(net, net, x), stream(net, fast, x)
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert fast.cache_info().entries == runs_compiled
            fast.refresh()


def test_gradients_through_drawing_control_flow_match_eager() -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = torch.relu(torch.tanh(x * self.w) * 2 + 1)
            if bool(x.sum() > 0):
                x = torch.sigmoid(torch.tanh(x) * 3) + 1
            return F.dropout(x, 0.5, True)

    net = Flow().eval()
    fast = tvmify(net, cache=False, compare=False)
    x = torch.randn(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one, other in zip(stream(net, fast, x), stream(net, net, x), strict=True):
            torch.testing.assert_close(one, other)


def test_draws_are_detected_in_programs_and_code() -> None:
    assert may_draw(None, {"aten::rand"})
    assert may_draw(Net(unread_only), ())
    assert not may_draw(nn.Linear(2, 2), {"aten::linear"})
