"""Graphs that pass through AOTAutograd before they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import tvmify
from tvmify.integrations.dynamo_graph import Origin
from tvmify.integrations.training import _compile
from tvmify.options import CompileOptions


def test_input_gradients_match_eager() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval()
    x = torch.randn(3, 8, requires_grad=True)
    (want,) = torch.autograd.grad(net(x).square().sum(), x)
    (got,) = torch.autograd.grad(torch.compile(net, backend="tvmify")(x).square().sum(), x)
    torch.testing.assert_close(got, want)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.sum()


@pytest.mark.parametrize(
    "function",
    [
        torch.func.grad(lambda x: _scaled(x).sum()),
        torch.func.jacrev(_scaled),
        lambda x: torch.vmap(lambda v: (x * v).tanh())(x),
    ],
    ids=["grad", "jacrev", "vmap"],
)
@torch.no_grad()  # in inference mode, eager PyTorch 2.11 computes gradients of 0
def test_transforms_within_a_graph_are_compiled(function: Callable[..., Any]) -> None:
    x = torch.randn(4)
    fast = torch.compile(function, backend="tvmify", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(fast(x), function(x))
    assert tvmify.cache_info(fast).eager == 0


def test_gradients_inside_a_forward_without_gradients() -> None:
    """Forces are gradients of an energy, also in inference."""
    net = nn.Linear(4, 1)

    def forces(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = net(x).tanh().sum()
            return torch.autograd.grad(energy, x)[0]

    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(forces, backend="tvmify")(x), forces(x))


def test_backward_in_eager_takes_results_of_a_compiled_forward() -> None:
    def backward(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.aten.view.default(x.transpose(1, 2), [6, 5]),)

    traced = torch.randn(2, 3, 5).transpose(1, 2)
    graph = make_fx(backward)(traced)
    options = CompileOptions(on_miss="eager")
    run = _compile(graph, [traced], origin=Origin.of(graph, [traced]), options=options)
    with pytest.warns(tvmify.TvmifyWarning, match="runs in eager"):
        (result,) = run([traced.contiguous()])  # in eager, it has the strides of `traced`
    torch.testing.assert_close(result, *backward(traced))


def test_a_backward_that_returns_views_takes_any_strides() -> None:
    def biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x.sin() + bias.flatten(0, 1)

    x = torch.randn(4, 6).t().requires_grad_()  # is saved for the backward
    bias = torch.randn(2, 3, 4, requires_grad=True)
    fast = torch.compile(biased, backend="tvmify", options={"strict": True})
    got = torch.autograd.grad(fast(x, bias).square().sum(), (x, bias))
    want = torch.autograd.grad(biased(x, bias).square().sum(), (x, bias))
    torch.testing.assert_close(got, want)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.layer(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _step(run: Callable[..., Any], net: nn.Module, x: torch.Tensor) -> list[Any]:
    """Return the result, the gradients and the state of the generator after a training step."""
    torch.manual_seed(0)
    net.zero_grad()
    y = run(x)
    y.square().sum().backward()
    gradients = [
        None if weight.grad is None else weight.grad.clone() for weight in net.parameters()
    ]
    return [y.detach(), *gradients, torch.get_rng_state()]


def test_checkpoints_draw_the_same_numbers_again() -> None:
    net = Checkpointed()
    fast = torch.compile(net, backend="tvmify", options={"strict": True})
    for batch in (2, 3, 5):  # the second and third share programs
        x = torch.randn(batch, 8)
        torch.testing.assert_close(_step(fast, net, x), _step(net, net, x))
    info = tvmify.cache_info(fast)
    assert info.builds + info.disk_hits == 4
    assert info.eager == 0


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], first: nn.Module) -> None:
        super().__init__()
        self.first, self.rnn = first, kind(8, 8, num_layers=2, dropout=0.5)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(self.first(x))[0]).sin()


@torch._dynamo.config.patch(allow_rnn=True)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [nn.Identity(), nn.Linear(8, 8)], ids=["first", "second"])
def test_recurrent_layers_run_in_eager_and_the_code_around_them_compiled(
    kind: type[nn.RNNBase], first: nn.Module
) -> None:
    net = Recurrent(kind, first)
    fast = torch.compile(net, backend="tvmify", options={"strict": True})
    for length in (4, 5):
        x = torch.randn(length, 2, 8)
        torch.testing.assert_close(_step(fast, net, x), _step(net, net, x))
    assert tvmify.cache_info(fast).builds
    assert tvmify.cache_info(fast).eager == 0


@pytest.mark.thorough
@pytest.mark.parametrize("is_transposed", [False, True])
def test_numbers_are_drawn_in_the_order_of_memory(is_transposed: bool) -> None:
    """For a transposed tensor: an argument, a result of attention, one saved for the backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layer, nn.functional.dropout(x, 0.3), use_reentrant=False)

    net = Net()
    fast = torch.compile(net, backend="tvmify", options={"strict": True})
    for batch in (2, 3):
        x = torch.randn(5, batch, 8).transpose(0, 1) if is_transposed else torch.randn(batch, 5, 8)
        torch.testing.assert_close(_step(fast, net, x), _step(net, net, x), rtol=1e-4, atol=1e-5)
