"""Run ResNet-18 on a real photograph, and compare it with eager PyTorch.

It shows that the logits match eager's, although batch norms are folded into the convolutions and
weights are packed once. The photograph (a temple in China) comes with scikit-learn. The weights are
random, but the same in each run, since no Python package contains trained ones.

    python examples/02_photograph.py
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn import functional as F

from resnet import seeded_resnet18
from stopwatch import medians, timed
from tvmify import tvmify


def photograph(side: int) -> Tensor:
    """Return the center of the photograph, ``(1, 3, side, side)``, normalized as for ImageNet."""
    pixels = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1) / 255  # (3, 427, 640)
    left = (pixels.shape[2] - pixels.shape[1]) // 2
    square = pixels[None, :, :, left : left + pixels.shape[1]]
    small = F.interpolate(square, (side, side), mode="bilinear", antialias=True)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (small - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)


@torch.inference_mode()
def main() -> None:
    """Classify the photograph, compiled and in eager; print the five best classes and the times."""
    parser = argparse.ArgumentParser(description="ResNet-18 on a photograph.")
    parser.add_argument("--side", type=int, default=224, help="pixels of a side of the image")
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    arguments = parser.parse_args()

    image = photograph(arguments.side)
    eager = seeded_resnet18()
    fast = tvmify(eager, target="llvm")  # shares the weights; `eager` stays as it is

    expected = eager(image)
    logits, first = timed(lambda: fast(image))
    top, expected_top = logits.topk(5), expected.topk(5)
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    assert top.indices.equal(expected_top.indices), "another top five than eager"
    assert difference < 1e-4, f"the logits differ from eager's by {difference:.1e}"

    console = Console()
    classes = Table("class", "tvmify", "eager PyTorch", box=None)
    for index, ours, theirs in zip(
        top.indices[0].tolist(),
        top.values[0].tolist(),
        expected_top.values[0].tolist(),
        strict=True,
    ):
        classes.add_row(str(index), f"{ours:.5f}", f"{theirs:.5f}")
    console.print(classes)
    console.print(f"The same top five; largest difference / largest logit: {difference:.1e}.\n")

    later, in_eager = medians(lambda: fast(image), lambda: eager(image), rounds=arguments.rounds)
    console.print(f"first call {first:.1f} ms, later calls {later:.1f} ms, eager {in_eager:.1f} ms")


if __name__ == "__main__":
    main()
