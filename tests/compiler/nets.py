"""Small networks of the kinds that GPUs run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """A stem, pools, a block with a residual, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False)
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.head = nn.Linear(8, 10)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(self.stem(x))), 3, 2, 1)
        x = F.relu(x + self.second(self.block(x)))
        return self.head(F.avg_pool2d(x, 2).mean((2, 3)))


class Block(nn.Module):
    """A typical transformer block, with separate projections and a mask."""

    def __init__(self, size: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(size, size) for _ in range(4))
        self.wide, self.narrow = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        normed = self.norms[0](x)
        query, key, value = (
            project(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in self.projections[:3]
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.projections[3](seen.transpose(1, 2).reshape(batch, length, size))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Bags(nn.Module):
    """Embeddings of words, their mean, and a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.words(words).mean(1)), -1)
