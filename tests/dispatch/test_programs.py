"""Captures for any sizes, which are kept for programs of other classes of sizes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerances import assert_close_to_reference
from tvmify import compiler
from tvmify import tvmify as decorate


class Net(nn.Module):
    """Can be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).softmax(-1)


class Recorded(Net):
    """Recorded by torch.export, since TorchScript refuses star arguments."""

    def forward(self, *tensors: Any) -> torch.Tensor:
        return super().forward(*tensors)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by one with each recording."""
    made: list[Any] = []
    original = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs.get("dynamic_shapes"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    return made


def compiled(cls: type[Net]) -> Any:
    torch.manual_seed(0)
    return decorate(cls().eval(), cache=False, strict=True)


def check(fast: Any, rows: int) -> None:
    x = torch.randn(rows, 8)
    with torch.no_grad():
        eager = Net().eval()
        eager.load_state_dict(fast.state_dict())
        assert_close_to_reference(fast(x), eager, (x,), {})


@pytest.mark.parametrize("cls", [Net, Recorded])
def test_all_classes_of_sizes_share_a_recording(cls: type[Net], exports: list[Any]) -> None:
    fast = compiled(cls)
    for rows in (5, 7, 40, 300):
        check(fast, rows)
    assert fast.cache_info().builds == 3
    assert len(exports) == 2  # one of them for the first call only


@pytest.mark.parametrize("cls", [Net, Recorded])
def test_captured_program_does_not_keep_weights_alive(cls: type[Net]) -> None:
    fast = compiled(cls)
    check(fast, 5)
    check(fast, 7)
    old = [weakref.ref(weight) for weight in fast.parameters()]
    fast.load_state_dict({k: v + 1 for k, v in fast.state_dict().items()}, assign=True)
    check(fast, 5)  # each program holds those that it was called with last
    check(fast, 7)
    gc.collect()
    assert [each() for each in old] == [None] * 4
    check(fast, 100)  # of the same recording, with the new weights
    assert fast.cache_info().builds == 3


def test_decompositions_are_freed_with_their_capture() -> None:
    gc.collect()
    before = len(compiler._DECOMPOSED)
    fast = compiled(Recorded)
    check(fast, 5)
    check(fast, 7)
    assert len(compiler._DECOMPOSED) == before + 1
    fast.refresh()
    gc.collect()
    assert len(compiler._DECOMPOSED) == before
