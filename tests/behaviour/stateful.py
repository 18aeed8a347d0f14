"""Modules with state, and arguments for them."""

from __future__ import annotations

import torch
from torch import nn


class Stateful(nn.Module):
    """The base of the modules here, with two buffers, a plain tensor and a weight."""

    calls: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2, 6, 4), persistent=False)
        self.total = torch.zeros(4)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))


def inputs(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same elements, every second column of a larger tensor."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


X = inputs(3, 2, 4)


def twice_written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    x[:, 1:].mul_(2)
    return x
