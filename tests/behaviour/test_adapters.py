"""Weights that are computed from others: parametrizations, and adapters that are switched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class LowRank(nn.Module):
    """A parametrization like an adapter's."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(6, 2))
        self.is_on = True

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down if self.is_on else weight


PARAMETRIZATIONS: list[Callable[[nn.Module], Any]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    lambda layer: parametrize.register_parametrization(layer, "weight", LowRank()),
]


@pytest.fixture
def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)).eval()


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("add", PARAMETRIZATIONS)
def test_parametrized_weights_run_compiled(add: Callable[[Any], Any], plain: Any) -> None:
    add(plain[0])
    plain.eval()
    fast = tvmify(plain, strict=True)
    with parametrize.cached():
        torch.testing.assert_close(fast(X), plain(X))
    for parameter in plain.parameters():
        parameter.mul_(1.5)
        assert_close_to_reference(fast(X), plain, (X,))
    assert fast.cache_info().builds == 1
    parametrize.remove_parametrizations(plain[0], "weight")
    assert_close_to_reference(fast(X), plain, (X,))


class Adapted(nn.Module):
    """A layer with adapters that are switched and merged as in PEFT."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.ParameterDict({name: torch.randn(2, layer.in_features) for name in "ab"})
        self.up = nn.ParameterDict({name: torch.randn(layer.out_features, 2) for name in "ab"})
        self.scaling = {"a": 0.5, "b": 1.0}
        self.active: list[str] = []
        self.merged: list[str] = []

    def change(self, name: str) -> torch.Tensor:
        return self.up[name] @ self.down[name] * self.scaling[name]

    def merge(self) -> None:
        for name in self.active:
            self.layer.weight.data += self.change(name)
            self.merged.append(name)

    def unmerge(self) -> None:
        while self.merged:
            self.layer.weight.data -= self.change(self.merged.pop())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        for name in [] if self.merged else self.active:
            y = y + x @ self.down[name].T @ self.up[name].T * self.scaling[name]
        return y


@pytest.mark.usefixtures("inference")
def test_adapters_are_switched_scaled_and_merged_in_place(plain: Any) -> None:
    layer = plain[0] = Adapted(plain[0]).eval()
    fast = tvmify(plain, strict=True)
    steps: list[Callable[[], Any]] = [
        lambda: None,
        lambda: layer.active.append("a"),
        lambda: layer.scaling.__setitem__("a", 3.0),
        layer.merge,
        layer.unmerge,
        lambda: layer.active.append("b"),
        layer.active.reverse,
        layer.active.clear,
    ]
    for step in steps:
        step()
        for _ in range(2):
            torch.testing.assert_close(fast(X), plain(X))
    # "Off" and "merged" share a program, and returning to a state builds nothing.
    assert fast.cache_info().builds <= 5


@pytest.mark.usefixtures("inference")
def test_adapters_may_be_switched_for_each_request(plain: Any) -> None:
    layer = plain[0] = Adapted(plain[0]).eval()
    fast = tvmify(plain, strict=True)
    for number in range(40):
        layer.active = [["a"], ["b"]][number % 2]
        fast(X)
    assert fast.cache_info().misses == 2
    torch.testing.assert_close(fast(X), plain(X))
