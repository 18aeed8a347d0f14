"""Kernels with two results that are both read later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.programs import check

# torch's modules set their own attributes during export.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")


class Repeated(nn.Module):
    """The last states of many calls of one LSTM, as one value."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 1)
        self.calls = calls

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        total = torch.zeros_like(h)
        for _ in range(self.calls):
            _, (last, cell) = self.lstm(x, (h, c))
            total = total + last * cell
        return total


class Directions(nn.Module):
    """The last states of all layers and directions, as one value."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 1, 2, bidirectional=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        _, (last, cell) = self.lstm(x, (h, c))
        return last * cell


class Views(nn.Module):
    """Results, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        every, (last, cell) = self.lstm(x)
        return every, every.reshape(-1), last.reshape(4, -1), cell.reshape(-1), cell


def _states(count: int) -> tuple[Tensor, ...]:
    return torch.randn(7, 2, 3), torch.randn(count, 2, 1), torch.randn(count, 2, 1)


def test_many_states_are_merged_in_order():
    # So many that their hash table grows, which changes their order.
    artifact = check(Repeated(20).eval(), *_states(1))
    assert sum("multiply" in name for name in artifact.report["kernels"]) == 1


def test_both_directions():
    check(Directions().eval(), *_states(4))


def test_views_of_results():
    check(Views().eval(), torch.randn(7, 2, 3))
