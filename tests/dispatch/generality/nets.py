"""Modules whose calls differ in sizes, with functions to compile and compare them."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify as decorate


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        at = torch.arange(x.size(1))
        half = x[:, : math.ceil(x.size(1) / 2)] * 2
        joined = torch.cat([x[:, :1], x[:, 1:] * 2], 1) + at[:, None]
        return joined, x[:, -1] * 2, x.mean(1), half


class Pair(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.linear(x), y + 1


def compiled(module: nn.Module, dynamic: bool | None = None, **options: Any) -> Any:
    """Decorate a copy of a module, with counters that start at zero."""
    options = {"cache": False, "strict": True} | options
    return decorate(copy.deepcopy(module).eval(), dynamic=dynamic, **options)


def check(fast: Any, module: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        assert_close_to_reference(fast(*args), module.eval(), args, {})


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
