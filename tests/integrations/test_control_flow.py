"""``torch.cond``, ``torch.while_loop`` and ``x.data = y`` under ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify import NotCompiled


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        (z,) = torch.cond(
            x.sum() > 0, lambda t: (self.second(t) * 2 + 1,), lambda t: (t.sin() - 1,), (y,)
        )
        return torch.sigmoid(self.first(z))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = while_loop(
            lambda t, n: n > 0, lambda t, n: (t.tanh() + t.cos(), n - 1), (x, x.sum().int())
        )
        return torch.sigmoid(self.first(y))


@pytest.mark.parametrize("model", [Branches, Loop])
def test_control_flow_runs_in_python_and_the_code_around_it_compiled(
    model: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    net = model().eval()
    compiled = torch.compile(net, backend="tvmify", options={"compare": False, "strict": True})
    up, down = torch.full((2, 8), 0.2), torch.full((2, 8), -0.2)
    with torch.no_grad():
        for x in (up, down, up):
            assert_close_to_reference(compiled(x), net, (x,))
    info = tvmify.cache_info(compiled)
    assert info.eager == 0
    assert info.builds + info.disk_hits == 4


class Limited(nn.Module):
    """A layer that limits the norm of its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        self.second.weight.data = torch.renorm(self.second.weight.data, 2, 0, 0.5) * 0.9
        return self.second(y) * 2


def test_assigned_data_belongs_to_the_weight() -> None:
    plain, net = Limited().eval(), Limited().eval()
    compiled = torch.compile(net, backend="tvmify", options={"compare": False, "strict": True})
    x = torch.ones(2, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), plain(x))
            torch.testing.assert_close(net.second.weight, plain.second.weight)
    info = tvmify.cache_info(compiled)
    assert info.eager == 0
    assert info.builds + info.disk_hits == 2


def test_weights_whose_data_is_assigned_are_trained() -> None:
    plain, net = Limited(), Limited()
    compiled = torch.compile(net, backend="tvmify", options={"compare": False, "strict": True})
    for _ in range(2):
        for module, forward in ((plain, plain), (net, compiled)):
            module.zero_grad()
            forward(torch.ones(2, 8)).pow(2).sum().backward()
            torch.optim.SGD(module.parameters(), 0.1).step()
        torch.testing.assert_close(net.state_dict(), plain.state_dict())


def test_a_decorated_module_names_the_way_that_compiles_it() -> None:
    net = tvmify.tvmify(Branches().eval(), strict=True)
    for _ in range(2):  # twice: Dynamo keeps no state from the first
        expected = pytest.raises(NotCompiled, match=r"functions: cond.*torch\.compile\(model, ")
        with torch.no_grad(), expected:
            net(torch.ones(2, 8))
