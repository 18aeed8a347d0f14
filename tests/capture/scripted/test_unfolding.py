"""Source for TorchScript that keeps Python's meaning."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.jit import frontend

from tvmify import tvmify
from tvmify.capture.scripted.scripting import script
from tvmify.capture.scripted.unfolding import unfolded

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Or(nn.Module):
    def forward(self, x: Tensor, k: Any = None) -> Tensor:
        k = k or 2.0
        return x * k


class OrTensor(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return (k or x) * 2


class AndTensor(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return (k and x) * 2


class OfNumbers(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        size = self.size or 5
        last = self.size and 7
        is_wide = x.dim() == 2 and x.size(1) > 2
        return x * size + last + (1 if is_wide and not (size == 5 or last == 7) else 3)


def outcome(call: Callable[..., Tensor], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except RuntimeError as error:
        return str(error)


lazy = types.ModuleType("lazy")


def naming_lazy_module(x: Tensor) -> Tensor:
    return x + 1 if lazy.heavy.is_used() else x


def test_lookup_does_not_import_lazy_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    # This makes torch import torch._dynamo and sympy, which takes a second.
    imported: list[str] = []
    monkeypatch.setattr(lazy, "__getattr__", imported.append, raising=False)
    with unfolded(frozenset()):
        frontend.parse_def(naming_lazy_module)
    assert imported == []


def test_functions_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse: Callable[[Any], Any] = frontend.parse_def

    def counting(function: Any) -> Any:
        parsed.append(function.__qualname__)
        return parse(function)

    monkeypatch.setattr(frontend, "parse_def", counting)
    script(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), OfNumbers(1)))
    assert parsed.count("Linear.forward") == 1
    assert parsed.count("OfNumbers.forward") == 1


@pytest.mark.parametrize("kind", [Or, OrTensor, AndTensor])
@pytest.mark.parametrize(
    "k", [torch.zeros(1), torch.full((1,), 3.0), torch.tensor(1), torch.ones(3), torch.zeros(0)]
)
@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_the_value_is_an_operand(kind: type[nn.Module], k: Tensor) -> None:
    module = kind().eval()
    with torch.inference_mode():
        expected = outcome(module, X, k)
        actual = outcome(tvmify(module, cache=False, compare=False), X, k)
    if isinstance(expected, str):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("size", [0, 3])
def test_number_operands_compile(size: int) -> None:
    module = OfNumbers(size).eval()
    with torch.inference_mode():
        fast = tvmify(module, cache=False, compare=False, strict=True)
        torch.testing.assert_close(fast(X), module(X))
