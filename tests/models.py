"""Networks that several tests use, in plain torch and with statistics as after training."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition", 2015."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [64, 64, 128, 256, 512]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    BasicBlock(inputs, outputs, 1 if inputs == outputs else 2),
                    BasicBlock(outputs, outputs, 1),
                )
                for inputs, outputs in pairwise(widths)
            )
        )
        self.fc = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


def trained(module: nn.Module) -> nn.Module:
    """Give batch norms the statistics of a trained network, and switch to evaluation."""
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            part.running_mean.normal_(0.0, 0.1)  # type: ignore[union-attr]
            part.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return module.eval()


def resnet18() -> nn.Module:
    """Return ResNet-18 with random weights."""
    return trained(ResNet18())
