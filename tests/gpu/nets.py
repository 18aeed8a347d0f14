"""Small networks of the kinds that run on GPUs, and arguments for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Convolutional(nn.Module):
    """A stem, a block with a residual, pools, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False)
        self.block = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(32), nn.BatchNorm2d(32)])
        self.head = nn.Linear(32, 10)
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.stem(x))), 3, 2, 1)
        x = F.relu(x + self.norms[1](self.block(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A causal transformer block, with embeddings before it."""

    def __init__(self, size: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(50, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(size, size) for _ in range(4))
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        batch, length, size = x.shape
        normed = self.norms[0](x)
        query, key, value = (
            project(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in self.projections[:3]
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projections[3](seen.transpose(1, 2).reshape(batch, length, size))
        return torch.log_softmax(x + self.narrow(F.gelu(self.wide(self.norms[1](x)))), -1)


def mlp() -> nn.Module:
    """Return three layers."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.Linear(128, 10)
    )


def image() -> torch.Tensor:
    """Return four images."""
    return torch.randn(4, 3, 64, 64)


def words() -> torch.Tensor:
    """Return two sentences."""
    return torch.randint(0, 50, (2, 33))


#: Networks by name, each with a function that makes its arguments.
NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutional": (Convolutional, image),
    "block": (Block, words),
    "mlp": (mlp, lambda: torch.randn(8, 64)),
}
