"""Code that reads buffers of one element while it is recorded, and branches on them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import TvmifyWarning, tvmify


class Switched(nn.Module):
    """Has the flag of a quantizer, and a number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor([False]))
        self.register_buffer("factor", torch.tensor(2))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x, *rest):  # which TorchScript does not know
        if not self.ready:
            return x - self.offset
        return (x + self.offset) * self.factor.item()


def test_branches_on_buffers_follow_their_values() -> None:
    net = Switched().eval()
    fast: Any = tvmify(net, cache=False, strict=True)
    x = torch.arange(6.0)

    def check(builds: int) -> None:
        assert torch.equal(fast(x), net(x))
        assert fast.cache_info().builds == builds

    check(1)
    net.ready.fill_(True)
    check(2)
    net.offset.fill_(3)  # only computed with
    check(2)
    net.factor = torch.tensor(3)
    check(3)
    net.factor.fill_(2)
    check(3)
    net.load_state_dict(Switched().state_dict())
    check(3)


class Codebook(nn.Module):
    """Initializes itself in its first call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(3))

    def forward(self, x, *rest):
        if not self.ready:
            self.codes.data.copy_(x[:3])
            self.ready.data.copy_(torch.tensor([True]))
        return x[:, None] - self.codes


def test_a_flag_that_the_first_call_sets_lets_the_second_compile() -> None:
    net = Codebook().eval()
    fast: Any = tvmify(copy.deepcopy(net), cache=False)
    x = torch.arange(6.0)
    with pytest.warns(TvmifyWarning, match="reads the value of ready, and writes to it"):
        assert torch.equal(fast(x), net(x))
    assert torch.equal(fast(x + 1), net(x + 1))
    assert (fast.cache_info().builds, fast.cache_info().eager) == (1, 1)


class Counter(nn.Module):
    """Counts its calls, and branches on their number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.body = nn.Linear(6, 6)

    def forward(self, x, *rest):
        x = x + 1 if self.calls > 6 else x
        self.calls += 1
        return self.body(x)


def test_a_buffer_that_each_call_changes_leaves_the_control_flow_to_python() -> None:
    net = Counter().eval()
    fast: Any = tvmify(copy.deepcopy(net), cache=False)
    x = torch.arange(6.0)
    with torch.no_grad(), pytest.warns(TvmifyWarning, match="reads the value of calls"):
        for _ in range(9):
            torch.testing.assert_close(fast(x), net(x))
    assert fast.calls == net.calls
    assert fast.cache_info().builds == 1
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} == {"Counter.body"}
