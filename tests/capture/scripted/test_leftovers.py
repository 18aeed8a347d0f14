"""Nothing made for a capture keeps a module's tensors alive, once its program is loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tvmify import tvmify
from tvmify.dispatch import load_or_build

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.rest = nn.ModuleList([nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"last": nn.Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        for layer in self.named.values():
            x = layer(x)
        return x


class Ignoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @torch.jit.ignore  # type: ignore[misc]
    def names(self) -> list[str]:
        return [name for name, _ in self.named_parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Exported(nn.Module):
    """A module that TorchScript begins to compile, and then refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), Ignoring()

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        return self.part(self.first(x))


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], nn.Module]], Any]]:
    """Call a module whose program is on disk, and turn off the garbage collector after that."""

    def load(make: Callable[[], nn.Module]) -> Any:
        tvmify(make().eval())(X)  # stores the program
        monkeypatch.setattr(load_or_build, "_LOADED", weakref.WeakValueDictionary())
        gc.collect()
        gc.disable()
        fast: Any = tvmify(make().eval())
        fast(X)
        info = fast.cache_info()
        assert (info.builds, info.eager) == (0, 0)
        assert info.disk_hits
        return fast

    with torch.no_grad():
        yield load
    gc.enable()


@pytest.mark.parametrize("make", [_sequential, Nested, Ignoring, Exported])
def test_parameters_of_a_loaded_program_can_be_swapped(
    make: Callable[[], nn.Module],
    loaded: Callable[[Callable[[], nn.Module]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = loaded(make)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    fast.double()
    assert {parameter.dtype for parameter in fast.parameters()} == {torch.float64}


@pytest.mark.parametrize("make", [_sequential, Nested, Ignoring])
def test_a_loaded_program_keeps_no_weights(
    make: Callable[[], nn.Module], loaded: Callable[[Callable[[], nn.Module]], Any]
) -> None:
    fast = loaded(make)
    weights = [weakref.ref(parameter) for parameter in fast.parameters()]
    del fast
    assert not any(weight() is not None for weight in weights)
