"""Train a small convolutional network on handwritten digits, then compile it.

It shows that training works as usual, that the compiled network makes the same prediction for every
test image, and that weights from further training are used without compiling again.

    python examples/03_digits.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from tvmify import tvmify


class DigitNet(nn.Module):
    """Two convolutions and a linear layer: 8×8 images to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, 10)`` from ``(batch, 1, 8, 8)``."""
        return self.layers(images)


def train(net: nn.Module, images: Tensor, digits: Tensor, epochs: int) -> None:
    """Train for some epochs, in batches of 64."""
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images[batch]), digits[batch]).backward()
            optimizer.step()
    net.eval()


def main() -> None:
    """Train, compile, compare; train on, compare again."""
    parser = argparse.ArgumentParser(description="Train on digits, then compile.")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    split = train_test_split(images, digits, test_size=0.3, random_state=0)
    train_images, test_images, train_digits, test_digits = split

    net = DigitNet()
    train(net, train_images, train_digits, arguments.epochs)
    fast = tvmify(net, target="llvm")  # shares the weights; `net` stays as it is

    def compare(when: str) -> None:
        with torch.inference_mode():
            expected, logits = net(test_images), fast(test_images)
        assert logits.argmax(1).equal(expected.argmax(1)), "another prediction than eager"
        accuracy = [(each.argmax(1) == test_digits).float().mean() for each in (expected, logits)]
        assert accuracy[0] == accuracy[1]
        print(
            f"{when}: {accuracy[0]:.2%} right in eager, {accuracy[1]:.2%} compiled; "
            f"all {len(logits)} predictions equal, {fast.cache_info().builds} compiled so far"
        )

    compare("After training")
    builds = fast.cache_info().builds
    train(net, train_images, train_digits, epochs=1)
    compare("After one more epoch")
    assert fast.cache_info().builds == builds, "new weights must not compile anything"


if __name__ == "__main__":
    main()
