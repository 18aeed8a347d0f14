"""`tvmify.enable`: graphs that TorchScript's executor runs, with and without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.threads import running
from tests.tolerances import assert_close_to_reference
from tvmify import OptionError
from tvmify.integrations.enable import GraphCalls


def net_class() -> type[nn.Module]:
    """Return a new class: modules of one class share the executor's optimized graphs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.second(torch.relu(self.first(x))))

        @torch.jit.export
        def halved(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.first(x)) / 2

    return Net


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    tvmify.disable()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The decorated graphs of this test, in the order of their creation."""
    graphs: list[Any] = []
    make = GraphCalls._make

    def noted(self: GraphCalls, *args: Any) -> Any:
        result = make(self, *args)
        graphs.append(result.run)
        return result

    monkeypatch.setattr(GraphCalls, "_make", noted)
    return graphs


@pytest.fixture
def net() -> nn.Module:
    return net_class()().eval()


@pytest.mark.parametrize("form", [torch.jit.script, lambda net: torch.jit.trace(net, rows(2))])
@pytest.mark.usefixtures("inference")
def test_a_module_runs_compiled(form: Any, net: Any, made: list[Any]) -> None:
    module = form(net)
    tvmify.enable()
    for _ in range(4):
        x = rows(2)
        assert_close_to_reference(module(x), net, (x,))
    (graph,) = made
    info = graph.cache_info()
    assert (info.builds, info.eager) == (1, 0)
    assert info.hits >= 2
    net.first.weight.mul_(2)  # both share it
    assert_close_to_reference(module(x), net, (x,))
    module(rows(5))
    assert graph.cache_info().builds == 2  # the first call with another shape
    assert len(made) == 1


@pytest.mark.usefixtures("inference")
def test_methods_and_modules_of_one_class_are_distinguished(net: Any, made: list[Any]) -> None:
    twin, x = type(net)().eval(), rows(3)
    script, other = torch.jit.script(net), torch.jit.script(twin)
    expected = [net(x), twin(x), net.halved(x), twin.halved(x)]
    tvmify.enable()
    for _ in range(4):
        actual = [script(x), other(x), script.halved(x), other.halved(x)]
        torch.testing.assert_close(actual, expected)
    assert len(made) == 4
    script.first.weight = nn.Parameter(torch.zeros(16, 8))
    assert script.halved(x).equal((torch.relu(script.first.bias) / 2).expand(3, -1))


@pytest.mark.usefixtures("inference")
def test_disabled_runs_plain_jit(net: nn.Module, made: list[Any]) -> None:
    module, x = torch.jit.script(net), rows(2)
    with tvmify.enable():
        for _ in range(3):
            module(x)
    (graph,) = made
    calls = graph.cache_info().hits
    assert module(x).equal(net(x))
    assert graph.cache_info().hits == calls
    with tvmify.enable():
        module(x)
        with tvmify.enable(accuracy="strict"):
            module(x)
        assert len(made) == 2
    assert made[0].cache_info().hits == calls + 1


@pytest.mark.usefixtures("inference")
def test_control_flow_and_writes_stay_right(made: list[Any]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            y = torch.relu(y) * 2 - 1 if bool(y.sum() > 2) else torch.exp(y) + i
        x.add_(y.mean())
        return x.view(-1)

    script = torch.jit.script(function)
    tvmify.enable()
    for step in range(4):
        x, y = torch.randn(2, 3), torch.randn(3) + step
        mine = x.clone()
        result, expected = script(mine, y), function(x, y)
        torch.testing.assert_close(mine, x)
        torch.testing.assert_close(result, expected)
        assert result.data_ptr() == mine.data_ptr()
    assert made


@pytest.mark.usefixtures("inference")
def test_untaken_branch_compiles_when_taken(made: list[Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return torch.relu(x) * 2 + 1
        return torch.tanh(x) * 3 - 1

    script, x = torch.jit.script(function), torch.rand(5)
    tvmify.enable()
    for signed in (x, x, x, -x, -x):
        torch.testing.assert_close(script(signed), function(signed))
    (graph,) = made
    assert graph.explain().methods[0].signatures[0].runs == "regions"


@pytest.mark.usefixtures("inference")
def test_a_frozen_module_runs_compiled(net: nn.Module, made: list[Any]) -> None:
    frozen, x = torch.jit.freeze(torch.jit.script(net)), rows(2)
    tvmify.enable()
    for _ in range(3):
        assert_close_to_reference(frozen(x), net, (x,))
    (graph,) = made
    assert graph.cache_info().builds == 1


@pytest.mark.usefixtures("inference")
def test_torchscript_errors_are_preserved(made: list[Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        if x.size(0) > 3:
            raise ValueError("too long")
        return y + 1

    script = torch.jit.script(function)
    tvmify.enable()
    for _ in range(3):
        script(rows(2))
    with pytest.raises(torch.jit.Error, match="too long"):
        script(rows(4))
    assert made


def test_gradients_match_the_jit(net: nn.Module) -> None:
    module, x = torch.jit.script(net), rows(2)
    with torch.no_grad(), tvmify.enable():
        for _ in range(3):
            module(x)
        with torch.enable_grad():
            module(x).sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad(set_to_none=True)
    net(x).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in net.parameters()])


@pytest.mark.usefixtures("inference")
def test_threads(net: nn.Module) -> None:
    module, x = torch.jit.script(net), rows(2)
    expected = net(x)

    def calls() -> None:
        with torch.inference_mode():
            for _ in range(50):
                assert torch.allclose(module(x), expected, atol=1e-5)

    with tvmify.enable(), running([calls] * 3):
        for _ in range(20):
            tvmify.disable()
            tvmify.enable()


def test_invalid_options_leave_it_disabled(net: nn.Module, made: list[Any]) -> None:
    with pytest.raises(OptionError, match=r"unknown option 'tagret'.* did you mean 'target'"):
        tvmify.enable(tagret="llvm")
    module = torch.jit.script(net)
    with torch.inference_mode():
        for _ in range(3):
            module(rows(2))
    assert not made


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 8)
