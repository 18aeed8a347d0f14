"""Networks that several tests use, with statistics as after training."""

from __future__ import annotations

from torch import nn

from examples.resnet import ResNet18


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
