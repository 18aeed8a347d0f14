"""Convolutional networks of full 3×3 convolutions: ResNet, VGG, U-Net."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.random_weights import with_random_weights
from examples.resnet import seeded_resnet18

Case = tuple[nn.Module, tuple[Tensor, ...]]


def resnet18() -> Case:
    """Return ResNet-18 and an image of 224² pixels."""
    return seeded_resnet18(), (torch.randn(1, 3, 224, 224),)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut around them (arXiv:1512.03385)."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, 4 * width, height / stride, width / stride)``."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """Images to the logits of a thousand classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, channels = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, 1000)`` from ``(batch, 3, height, width)``."""
        return self.classify(self.blocks(self.stem(images)).mean((2, 3)))


def resnet50() -> Case:
    """Return ResNet-50 and an image of 224² pixels."""
    return with_random_weights(ResNet50()), (torch.randn(1, 3, 224, 224),)


class VGG16(nn.Module):
    """Thirteen 3×3 convolutions and three large matmuls (arXiv:1409.1556)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classify = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 1000),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, 1000)`` from ``(batch, 3, 224, 224)``."""
        return self.classify(self.features(images).flatten(1))


def vgg16() -> Case:
    """Return VGG-16 and an image of 224² pixels."""
    return with_random_weights(VGG16()), (torch.randn(1, 3, 224, 224),)


def _double_convolution(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A contracting and an expanding path with shortcuts between them (arXiv:1505.04597)."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 2) -> None:
        super().__init__()
        inputs = (3, *widths)
        self.down = nn.ModuleList(
            _double_convolution(a, b) for a, b in zip(inputs, widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in steps)
        self.up = nn.ModuleList(_double_convolution(2 * b, b) for _, b in steps)
        self.classify = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, classes, height, width)`` from ``(batch, 3, height, width)``."""
        shortcuts: list[Tensor] = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else self.pool(x))
            shortcuts.append(x)
        shortcuts.pop()
        for widen, block in zip(self.widen, self.up):  # noqa: B905 (TorchScript's has no strict)
            x = block(torch.cat([shortcuts.pop(), widen(x)], 1))
        return self.classify(x)


def unet() -> Case:
    """Return a U-Net of four levels and an image of 256² pixels."""
    return with_random_weights(UNet()), (torch.randn(1, 3, 256, 256),)
