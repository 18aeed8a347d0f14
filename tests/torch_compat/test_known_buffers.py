"""Recorded code that reads small buffers, and branches on them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import TvmifyWarning, tvmify


class Switched(nn.Module):
    """Has a flag, as a quantizer does, and a number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor([False]))
        self.register_buffer("factor", torch.tensor(2))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x, *rest):  # TorchScript refuses star arguments
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
    net.offset.fill_(3)  # no branch depends on it
    check(2)
    net.factor = torch.tensor(3)
    check(3)
    net.factor.fill_(2)
    check(3)
    net.load_state_dict(Switched().state_dict())
    check(3)


class Columns(nn.Module):
    """Embeds the columns that are categories, as TabNet does."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        categories = torch.tensor([True, False, True])
        if is_buffer:
            self.register_buffer("categories", categories)
        else:
            self.categories = categories

    def forward(self, x, *rest):
        columns = []
        for column, is_category in enumerate(self.categories):
            column = x[:, column : column + 1]
            columns.append(self.table(column[:, 0].long()) if is_category else column)
        return torch.cat(columns, 1)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_branches_on_elements_follow_their_values(is_buffer: bool) -> None:
    torch.manual_seed(0)
    net = Columns(is_buffer).eval()
    fast: Any = tvmify(net, cache=False, strict=True, compare=False)
    x = torch.tensor([[0.0, 2.5, 4.0], [3.0, -1.0, 1.0]])
    for categories, builds in (([1, 0, 1], 1), ([1, 0, 0], 2), ([0, 0, 1], 3), ([1, 0, 0], 3)):
        net.categories.copy_(torch.tensor(categories))
        assert torch.equal(fast(x), net(x))
        assert fast.cache_info().builds == builds


def test_large_buffers_are_not_read() -> None:
    net = Columns(True).eval()
    net.categories = torch.zeros(65, dtype=torch.bool)
    fast: Any = tvmify(net, cache=False, compare=False)
    x = torch.randn(2, 65)
    with pytest.warns(TvmifyWarning):
        assert torch.equal(fast(x), net(x))
    assert fast.cache_info().builds == 0


class Viewed(nn.Module):
    """Returns views of buffers that it also branches on."""

    table: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor([True]))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x, *rest):
        first, *_ = self.table
        rows = self.table.view(2, 3).t()[1:]
        return x + first if self.ready else x, self.ready.view(1, 1), rows, self.table[x.size(0) :]


def test_views_of_buffers_share_their_memory() -> None:
    net = Viewed().eval()
    fast: Any = tvmify(net, cache=False, strict=True, compare=False)
    for length in (1, 2, 4):
        x = torch.arange(float(length))
        (mine, *views), (eager, *expected) = fast(x), net(x)
        assert torch.equal(mine, eager)
        for view, wanted in zip(views, expected, strict=True):
            assert torch.equal(view, wanted)
            assert (view.data_ptr(), view.stride()) == (wanted.data_ptr(), wanted.stride())


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
