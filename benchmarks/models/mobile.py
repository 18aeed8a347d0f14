"""Networks of depthwise convolutions: MobileNetV2, an EfficientNet, ConvNeXt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.random_weights import with_random_weights

Case = tuple[nn.Module, tuple[Tensor, ...]]


def _convolution(
    channels_in: int,
    channels: int,
    size: int,
    stride: int = 1,
    groups: int = 1,
    activation: Callable[[], nn.Module] | None = None,
) -> nn.Sequential:
    convolution = nn.Conv2d(
        channels_in, channels, size, stride, padding=size // 2, groups=groups, bias=False
    )
    layers = [convolution, nn.BatchNorm2d(channels)]
    return nn.Sequential(*layers, *([activation()] if activation else []))


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate computed from the means of all (arXiv:1709.01507)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        gate = F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.excite(gate))


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; a shortcut if the shape allows (arXiv:1801.04381)."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        expansion: int,
        size: int,
        stride: int,
        activation: Callable[[], nn.Module],
        gated: bool,
    ) -> None:
        super().__init__()
        wide = channels_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_convolution(channels_in, wide, 1, activation=activation))
        layers.append(_convolution(wide, wide, size, stride, groups=wide, activation=activation))
        if gated:
            layers.append(SqueezeExcite(wide, channels_in // 4))
        layers.append(_convolution(wide, channels, 1))
        self.body = nn.Sequential(*layers)
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, channels, height / stride, width / stride)``."""
        y = self.body(x)
        return x + y if self.shortcut else y


class MobileNet(nn.Module):
    """Inverted residuals between a stem and a head.

    Parameters
    ----------
    stages
        For each: expansion, channels, number of blocks, stride of the first, size of the filter.
    activation
        Makes the activation module.
    gated
        Whether blocks have squeeze-excite.
    """

    def __init__(
        self,
        stages: tuple[tuple[int, int, int, int, int], ...],
        activation: Callable[[], nn.Module],
        gated: bool,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, 2, activation=activation)]
        width = 32
        for expansion, channels, count, stride, size in stages:
            for index in range(count):
                first = stride if index == 0 else 1
                layers.append(
                    InvertedResidual(width, channels, expansion, size, first, activation, gated)
                )
                width = channels
        layers.append(_convolution(width, 1280, 1, activation=activation))
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(1280, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, 1000)`` from ``(batch, 3, height, width)``."""
        return self.classify(self.features(images).mean((2, 3)))


def mobilenet_v2() -> Case:
    """Return MobileNetV2 and an image of 224² pixels."""
    stages = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 32, 3, 2, 3),
        (6, 64, 4, 2, 3),
        (6, 96, 3, 1, 3),
        (6, 160, 3, 2, 3),
        (6, 320, 1, 1, 3),
    )
    network = MobileNet(stages, nn.ReLU6, gated=False)
    return with_random_weights(network), (torch.randn(1, 3, 224, 224),)


def efficientnet() -> Case:
    """Return EfficientNet-B0 (arXiv:1905.11946) and an image of 224² pixels."""
    stages = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    network = MobileNet(stages, nn.SiLU, gated=True)
    return with_random_weights(network), (torch.randn(1, 3, 224, 224),)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of ``(batch, channels, height, width)``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor of the shape of ``input``."""
        last = input.permute(0, 2, 3, 1)
        last = F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps)
        return last.permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A 7×7 depthwise convolution, then an MLP per pixel (arXiv:2201.03545)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filter = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        y = self.norm(self.filter(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """ConvNeXt-T: images to the logits of a thousand classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, stride=4), ChannelNorm(96, eps=1e-6)]
        width = 96
        for channels, count in ((96, 3), (192, 3), (384, 9), (768, 3)):
            if channels != width:
                layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, channels, 2, stride=2)]
                width = channels
            layers += [ConvNextBlock(channels) for _ in range(count)]
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classify = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, 1000)`` from ``(batch, 3, height, width)``."""
        return self.classify(self.norm(self.features(images).mean((2, 3))))


def convnext_tiny() -> Case:
    """Return ConvNeXt-T and an image of 224² pixels."""
    return with_random_weights(ConvNext()), (torch.randn(1, 3, 224, 224),)
