"""Train a sequence classifier, then serve it, with `torch.compile(backend="tvmify")`.

It shows that forward and backward of a training step run compiled, that the trained weights serve
any length without a compilation for each, and that code between two graphs runs in Python.

    python examples/08_torch_compile.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import tvmify


class Classifier(nn.Module):
    """Tells whether most numbers of a sequence are from the first half of the alphabet."""

    def __init__(self, letters: int = 16, width: int = 32) -> None:
        super().__init__()
        self.letters = letters
        self.embedding = nn.Embedding(letters, width)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, 2)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(letters)
        return self.head(self.layers(x).mean(1))


def batch(rows: int, length: int, letters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sequences and their classes."""
    x = torch.randint(0, letters, (rows, length))
    return x, ((x < letters // 2).sum(1) * 2 > length).long()


def main() -> None:
    """Train, serve, and count programs."""
    parser = argparse.ArgumentParser(description="Train and serve with torch.compile.")
    parser.add_argument("--steps", type=int, default=100, help="steps of training")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    model = Classifier()
    # Compiled code is used even where eager is faster, as it may be for a model of this size.
    net = torch.compile(model, backend="tvmify", options={"compare": False})
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(arguments.steps):
        x, classes = batch(64, 15, model.letters)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), classes).backward()
        optimizer.step()
    print(f"{arguments.steps} steps of training: {tvmify.cache_info(net).builds} programs")

    model.eval()

    @torch.compile(backend="tvmify", options={"compare": False})
    def answer(letters: torch.Tensor) -> str:
        chances = torch.softmax(model(letters), -1)
        if chances[0, 1] > 0.5:  # depends on a value: Python decides, between two graphs
            return f"first half, {chances[0, 1]:.0%}"
        return f"second half, {chances[0, 0]:.0%}"

    with torch.inference_mode():
        for length in (9, 11, 13, 15):
            x, classes = batch(200, length, model.letters)
            right = (net(x).argmax(-1) == classes).double().mean()
            assert torch.equal(net(x).argmax(-1), model(x).argmax(-1))
            print(f"length {length}: {right:.0%} right, as in eager")
        print(answer(torch.zeros(1, 9, dtype=torch.int64)))
    info = tvmify.cache_info(net)
    print(f"{info.builds} programs, {info.eager} calls in eager")


if __name__ == "__main__":
    main()
