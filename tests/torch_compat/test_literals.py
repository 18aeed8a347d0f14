"""Recorded code that reads its own ``torch.tensor([...])``."""

import warnings

import pytest
import torch
from torch import nn

from tvmify import tvmify


class Checked(nn.Module):
    def forward(self, x, *rest):  # TorchScript refuses star arguments
        scale = torch.tensor([[1.5, 2.5]])
        if not bool((scale > 0).all()):
            raise ValueError("not positive")
        scale = scale * 2
        scale[0, 0] = 7
        return x * sum(scale[0].tolist())


class Sizes(nn.Module):
    def forward(self, x, *rest):
        sizes = torch.tensor([x.shape, (2, 2)]).prod(1).tolist()
        return torch.cat([x.flatten(), x.new_ones(4)]).split(sizes)[0] * 2


@pytest.mark.parametrize("cls", [Checked, Sizes])
def test_branches_on_literals_are_compiled(cls: type[nn.Module]) -> None:
    net = cls().eval()
    fast = tvmify(net, cache=False, strict=True)
    x = torch.arange(6.0).reshape(3, 2)
    torch.testing.assert_close(fast(x), net(x))


class OneElement(nn.Module):
    def forward(self, x, *rest):
        first = torch.tensor([1.0])
        first[0] = x[0, 0]
        return x * first.item()


class View(nn.Module):
    def forward(self, x, *rest):
        pair = torch.tensor([1.0, 2.0]) + 1
        pair.view(2, 1)[0] = x[0, 0]
        return x * 2 if pair.sum() > 0 else x * 3


class Put(nn.Module):
    def forward(self, x, *rest):
        pair = torch.tensor([1.0, 2.0])
        pair.view(2, 1).index_put_((torch.tensor([0]),), x[0, :1])
        return x * sum(pair.tolist())


@pytest.mark.parametrize("cls", [OneElement, View, Put])
def test_literals_change_with_writes_to_their_views(cls: type[nn.Module]) -> None:
    net = cls().eval()
    fast = tvmify(net, cache=False, compare=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they run in eager
        for value in (1.0, -9.0):
            x = torch.full((1, 2), value)
            assert torch.equal(fast(x), net(x))
