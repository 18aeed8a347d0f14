"""Small modules for several tests of the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Scaled(nn.Module):
    """A module with one of each kind of state that can change later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))
        self.scale = 2.0
        self.sizes = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale + self.shift * self.sizes[0]


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def assert_same(fast: Any, module: Any = None, x: torch.Tensor = X) -> None:
    module = module or fast
    with torch.no_grad():
        assert torch.allclose(fast(x), Scaled.forward(module, x), atol=1e-5)


class Minus(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y
