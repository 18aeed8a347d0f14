"""Models with short calls: an LSTM, an MLP, a recommender."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Tensor, ...]]


class LSTM(nn.Module):
    """Two layers of LSTM; the last step is classified."""

    def __init__(self, features: int = 256, hidden: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, classes)`` from ``(batch, steps, features)``."""
        steps, _ = self.lstm(x)
        return self.classify(steps[:, -1])


def lstm() -> Case:
    """Return an LSTM and 64 steps of 256 features."""
    return LSTM(), (torch.randn(1, 64, 256),)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp_1() -> Case:
    """Return three layers of width 512 and one vector."""
    return _mlp(512, 512, 512, 512), (torch.randn(1, 512),)


def mlp_64() -> Case:
    """Return three layers of width 512 and 64 vectors."""
    return _mlp(512, 512, 512, 512), (torch.randn(64, 512),)


class Recommender(nn.Module):
    """Embeddings of categories, combined with an MLP over numbers (DLRM, arXiv:1906.00091)."""

    def __init__(self, tables: int = 26, rows: int = 10_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.numbers = _mlp(13, 512, 256, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("left", pairs[0])
        self.register_buffer("right", pairs[1])
        self.top = _mlp(width + pairs.shape[1], 512, 256, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return ``(batch, 1)`` from ``(batch, 13)`` numbers and ``(batch, tables)`` indices."""
        dense = self.numbers(numbers)
        rows = [dense]
        for index, table in enumerate(self.tables):
            rows.append(table(categories[:, index]))
        stacked = torch.stack(rows, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        chosen = products[:, self.left, self.right]  # type: ignore[index]
        return torch.sigmoid(self.top(torch.cat([dense, chosen], 1)))


def dlrm() -> Case:
    """Return a recommender with 26 categories, and one example."""
    return Recommender(), (torch.randn(1, 13), torch.randint(10_000, (1, 26)))
