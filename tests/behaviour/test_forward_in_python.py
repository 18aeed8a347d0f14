"""A forward that only Python can run: the modules that it calls are compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.behaviour.control_flow import decorated, eager
from tvmify import NotCompiled, TvmifyWarning


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, **options: float) -> Tensor:
        return torch.tanh(self.linear(x)) * options.get("scale", 1.0) + x


class InPython(nn.Module):
    """Has a generator and keyword arguments, which TorchScript does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Block()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x, scale=0.5)
        for block in self.blocks:
            if x.abs().max() > 0.5:
                x = block(x)
        for block in self.blocks[1:]:
            x = block(x) * sum(y for y in (0.25, 0.25))
        return x if x.mean().item() > 0 else -x


@pytest.mark.usefixtures("inference")
def test_modules_called_from_python_are_compiled() -> None:
    net = decorated(InPython)
    net.head.register_forward_hook(lambda *_: None).remove()
    for scale in (1.0, 0.01, 1.0):
        x = torch.randn(2, 8) * scale
        assert_close(net(x), eager(net, x))
    info = net.cache_info()
    assert info.builds == 2  # one with scale, and one for all blocks, which are alike
    assert info.entries == 4
    assert "forward runs in Python" in str(net.explain())
    net.blocks[1].linear.weight.mul_(-1)
    assert_close(net(x), eager(net, x))
    net.blocks[0] = Block().eval().requires_grad_(False)
    assert_close(net(x), eager(net, x))
    assert net.cache_info().builds == 2


def test_modules_called_from_python_have_their_gradients() -> None:
    net = decorated(InPython)
    x = torch.randn(2, 8)
    with pytest.warns(TvmifyWarning, match="may have side effects.*it is not one program: ."):
        net(x).sum().backward()
    ours = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    eager(net, x).sum().backward()
    for name, p in net.named_parameters():
        assert_close(ours[name], p.grad)


def test_strict_refuses_a_forward_in_python() -> None:
    with pytest.raises(NotCompiled, match="values"), torch.no_grad():
        decorated(InPython, strict=True)(torch.randn(2, 8))


class SetsInPython(InPython):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


@pytest.mark.usefixtures("inference")
def test_attributes_set_from_python_are_set() -> None:
    net = decorated(SetsInPython)
    for _ in range(2):
        x = torch.randn(2, 8)
        assert_close(net(x), eager(net, x))
        assert_close(net.last, eager(net, x))
