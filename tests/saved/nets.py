"""Small models, and a function that saves and loads one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tvmify


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3))) * self.scale


def saved(model: Any, path: Path, *inputs: Any, **options: Any) -> Any:
    """Save for these calls and load, so that everything that is not compiled is an error."""
    file = path / "model.pt"
    tvmify.save(model, file, signatures=inputs, **options)
    return tvmify.load(file, strict=True)


def image(batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 3, 9, 9)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


class Unscriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        y = self.linear(x)
        if options.get("square"):
            y = y * y
        return {"y": y, "wide": y + 1 if y.shape[0] > 2 else y}
