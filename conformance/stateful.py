"""Small modules with state, for random sequences of calls and changes.

All take a float tensor of shape (batch, length, 4), and optional arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 4


class Options(nn.Module):
    """Attributes, numbers and an optional mask; returns a dict that contains the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.scale, self.residual = 1.5, True
        self.settings = {"shift": 0.5, "square": False}

    def forward(self, x: Tensor, factor: Any = 1, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Apply two layers, as configured by the attributes."""
        y = self.outer(torch.relu(self.inner(x))) * self.scale * factor + self.settings["shift"]
        if self.settings["square"]:
            y = y * y
        if self.residual:
            y = y + x
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return {"y": y, "x": x}


class Normalized(nn.Module):
    """Norms with running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.drop, self.last = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize channels, then positions."""
        y = self.norm(self.convolution(x.transpose(1, 2)))
        return self.last(self.drop(y.transpose(1, 2)))


class Counting(nn.Module):
    """Buffers that forward writes; one result is a view of a buffer."""

    calls: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move the average towards the mean of x."""
        self.calls += 1
        self.average.lerp_(x.detach().mean((0, 1)), 0.5)
        return self.linear(x - self.average), self.average[1:], self.calls + 1


class Tied(nn.Module):
    """An embedding that shares its weight with the head, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Embed the integer parts of the first column."""
        y = self.embedding(x[..., 0].detach().long().abs() % 7) + x
        return self.head(self.layer(torch.tanh(self.layer(y))))


class Containers(nn.Module):
    """Layers in a registered list and dict, and in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.named = nn.ModuleDict({"gate": nn.Linear(WIDTH, WIDTH), "act": nn.GELU()})
        self.plain = [nn.Linear(WIDTH, WIDTH), nn.SiLU()]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the result of each layer."""
        results = []
        for layer in [*self.several, *self.plain]:
            x = layer(x)
            results.append(x)
        return [*results, self.named["act"](x) * self.named["gate"](x)]


class Recurrent(nn.Module):
    """An LSTM; its state is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return all outputs, and the last state."""
        return self.lstm(x)


class Attending(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus its attention."""
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Branching(nn.Module):
    """A branch on a value, and a branch on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Use the left layer if the sum is positive."""
        x = x * 2 if self.training else x + 1
        return self.left(x) if x.sum() > 0 else self.right(x) - 1


class Writing(nn.Module):
    """Writes to its argument, and returns it with a new tensor and a view of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Double x in place."""
        x.mul_(2)
        y = self.linear(x)
        return x, y, y[:, 0]


class Drawing(nn.Module):
    """Draws random numbers in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add noise, and apply dropout."""
        return functional.dropout(self.linear(x) + torch.rand_like(x), 0.3, training=True)


class Attributed(nn.Module):
    """Sets attributes in each call, and returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.calls: float = 0
        self.shape = (0,)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Count calls."""
        self.calls += 1
        self.shape = tuple(x.shape)
        return self.linear(x) + self.bias, self.bias


MODULES: dict[str, type[nn.Module]] = {
    module.__name__: module
    for module in (
        Options,
        Normalized,
        Counting,
        Tied,
        Containers,
        Recurrent,
        Attending,
        Branching,
        Writing,
        Drawing,
        Attributed,
    )
}
#: Modules whose calls have side effects, or draw random numbers.
IMPURE = (Counting, Writing, Drawing, Attributed)
