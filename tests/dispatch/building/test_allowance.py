"""Time that calls spend on captures for builds in the background."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import tvmify as decorate
from tvmify.dispatch import on_miss
from tvmify.dispatch.building.allowance import Allowance


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_allowance_accrues_to_a_limit_and_can_be_overdrawn_once(clock: list[float]) -> None:
    allowance = Allowance(share=0.5, most=2.0)
    with allowance.spend() as may_begin:
        assert may_begin
        clock[0] += 5.0
    assert not allowance.has_room()  # 2 - 5, and half of the 5 seconds
    with allowance.spend() as may_begin:
        assert not may_begin
    clock[0] += 1.1
    assert allowance.has_room()
    clock[0] += 100.0
    with allowance.spend() as may_begin:
        assert may_begin
        clock[0] += 4.1
    assert not allowance.has_room()


def test_only_one_thread_spends() -> None:
    allowance = Allowance()
    seen: list[bool] = []

    def other() -> None:
        with allowance.spend() as may_begin:
            seen.append(may_begin)

    with allowance.spend() as may_begin, allowance.spend() as again:
        assert may_begin
        assert again
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [False]


class Exported(nn.Module):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.relu(x) * 2


def test_exhausted_allowance_runs_eager(monkeypatch: pytest.MonkeyPatch, inference: None) -> None:
    spent = Allowance(share=0.0, most=0.0)
    monkeypatch.setattr(on_miss, "allowance", spent)
    fast: Any = decorate(Exported().eval(), on_miss="background", cache=False)
    for rows in (1, 2, 1):
        x = torch.randn(rows, 3)
        assert torch.equal(fast(x), torch.relu(x) * 2)  # without a warning
    info = fast.cache_info()
    assert (info.postponed, info.eager, info.builds) == (3, 3, 0)
    assert "capture was postponed: 3" in str(fast.explain())
    fast.warmup([(1, 3)])  # waits, whatever the allowance
    assert fast.cache_info().entries == 1
