"""Results of compiled code in grad mode: which have gradients, and their values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tvmify import TvmifyWarning, tvmify

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Returning(nn.Module):
    """A layer, and results made from its output and its argument."""

    def __init__(self, results: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.results = results

    def forward(self, x: Tensor) -> Any:
        return self.results(self.linear(x), x)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor]:
        y = self.table(index)
        return y, y.detach()


def gradient(net: nn.Module, results: tuple[Tensor, ...]) -> Tensor | None:
    net.zero_grad()
    losses = [(i + 1) * result.square().sum() for i, result in enumerate(results)]
    sum(loss for loss in losses if loss.requires_grad).backward()  # type: ignore[union-attr]
    return net.linear.weight.grad  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "results",
    [
        lambda h, x: (h, h.detach()),
        lambda h, x: (h.detach(), h),
        lambda h, x: (h.detach(), h[0]),
        lambda h, x: (h.detach(), h[1:], h[2:]),
        lambda h, x: (h.t().detach(), h, h.view(-1)),
        lambda h, x: (h.sum(), h.mean().detach()),
        lambda h, x: (h, x * 2, x),
    ],
    ids=["after", "before", "part", "parts", "other axes", "computed", "of the argument"],
)
def test_results_without_gradients_have_none(results: Callable[[Tensor, Tensor], Any]) -> None:
    net = Returning(results).eval()
    fast: Any = tvmify(net, strict=True)
    expected = net(X)
    for _ in range(2):
        found = fast(X)
        assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
        ours, theirs = gradient(net, found), gradient(net, net(X))
        torch.testing.assert_close(ours, theirs)
        [y.numpy() for y in found if not y.requires_grad]  # PyTorch refuses it for others


def test_differentiable_results_are_known_after_an_error() -> None:
    net = Embedded().eval()
    fast: Any = tvmify(net, strict=True)
    with pytest.raises(IndexError, match="index out of range in self"):
        fast(torch.tensor([7]))
    assert [y.requires_grad for y in fast(torch.tensor([1]))] == [True, False]


def test_gradients_of_closures_come_from_eager() -> None:
    net = nn.Linear(8, 8).eval()
    fast: Any = tvmify(lambda x: net(x).relu())
    with pytest.warns(TvmifyWarning, match="a tensor of a closure, or a global tensor, requires"):
        fast(X).sum().backward()
    assert net.weight.grad is not None
    with torch.no_grad():
        fast(X)
    assert fast.cache_info().entries == 1
    net.requires_grad_(False)
    fast.refresh()
    assert not fast(X).requires_grad
    assert fast.cache_info().entries == 1


class Holder:
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)


def test_tensors_in_objects_have_gradients() -> None:
    net = Returning(lambda h, x: (Holder(h, x * 2), h.sum())).eval()
    fast: Any = tvmify(net, strict=True)
    for _ in range(2):
        holder, total = fast(X)
        assert type(holder) is Holder
        assert [y.requires_grad for y in holder.tensors] == [True, False]
        ours = gradient(net, (holder.tensors[0], total))
        holder, total = net(X)
        torch.testing.assert_close(ours, gradient(net, (holder.tensors[0], total)))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int, str]:
        y = torch.relu(self.linear(x) * 2 + 1)
        if bool(y.sum() > 0):
            y = torch.sigmoid(y * 2 + 1) / 2
        return y, x, x.shape[0], "y"


def test_results_of_regions_may_be_no_tensors() -> None:
    net = Branch().eval()
    fast: Any = tvmify(net, strict=True)
    found, expected = fast(X), net(X)
    assert found[1] is X and found[2:] == expected[2:]
    torch.testing.assert_close(gradient(net, found[:1]), gradient(net, expected[:1]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.second(y) if bool(y.sum() > 0) else y


def test_tied_weights_of_regions_get_their_gradient_once() -> None:
    net = Tied().eval()
    fast: Any = tvmify(net, strict=True)
    weight = net.first.weight
    found = torch.autograd.grad(fast(X).sum(), weight)
    torch.testing.assert_close(found, torch.autograd.grad(net(X).sum(), weight))


def test_hooks_of_weights_run_once() -> None:
    eager = nn.Linear(3, 2).eval()
    fast = tvmify(copy.deepcopy(eager), cache=False)
    x, seen = torch.randn(4, 3), []
    for module in (eager, fast):
        module.weight.register_hook(lambda gradient: gradient * 2)
        handle = torch.autograd.graph.register_multi_grad_hook(
            [module.weight, module.bias], lambda gradients: seen.append(len(gradients))
        )
        for _ in range(2):
            module(x).square().sum().backward()
        handle.remove()
        module(x).sum().backward()
    assert fast.cache_info().builds == 1
    assert seen == [2, 2] * 2
    torch.testing.assert_close(fast.weight.grad, eager.weight.grad)


def test_hooks_of_weights_run_once_for_gradients_of_gradients() -> None:
    eager = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).eval()
    fast = tvmify(copy.deepcopy(eager), cache=False)
    x = torch.randn(4, 3)
    for module in (eager, fast):
        module[0].weight.register_hook(lambda gradient: gradient * 2)
        (first,) = torch.autograd.grad(module(x).sum(), module[0].weight, create_graph=True)
        first.square().sum().backward()
    torch.testing.assert_close(fast[0].weight.grad, eager[0].weight.grad)


def test_checkpoints() -> None:
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    fast = tvmify(copy.deepcopy(eager), cache=False)
    x = torch.randn(4, 3)
    for module in (eager, fast):
        for _ in range(2):
            checkpoint(module, x, use_reentrant=False).sum().backward()
    assert fast.cache_info().builds == 1
    for ours, theirs in zip(fast.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
