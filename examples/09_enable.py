"""Trace ResNet-18, and time it in the JIT with and without `tvmify.enable()`.

It shows that after `tvmify.enable()`, TorchScript's executor runs compiled code, without a change
to the code that calls it. It follows the tutorial of torch_tvm, the predecessor of this project.

    python examples/09_enable.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import tvmify
from resnet import seeded_resnet18
from stopwatch import medians, timed


def traced(image: torch.Tensor) -> Any:
    """Trace a network; the executor optimizes each trace separately."""
    return torch.jit.trace(seeded_resnet18(), image)


@torch.inference_mode()
def main() -> None:
    """Trace, warm up, and measure."""
    parser = argparse.ArgumentParser(description="ResNet-18 in the JIT, with and without tvmify.")
    parser.add_argument("--side", type=int, default=224, help="pixels of a side of the image")
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    arguments = parser.parse_args()
    image = torch.rand(1, 3, arguments.side, arguments.side)

    alone, fast = traced(image), traced(image)
    for _ in range(3):  # the executor observes the first call, and optimizes at the second
        expected = alone(image)

    with tvmify.enable():
        _, warming = timed(lambda: [fast(image) for _ in range(3)])
        result = fast(image)
        with_it, without = medians(
            lambda: fast(image), lambda: alone(image), rounds=arguments.rounds
        )
    difference = ((result - expected).abs().max() / expected.abs().max()).item()
    assert difference < 1e-4, f"the logits differ from the JIT's by {difference:.1e}"
    print(f"Largest difference / largest logit: {difference:.1e}")
    print(f"warming up {warming / 1e3:.1f} s")
    print(f"the JIT {without:.1f} ms, with tvmify {with_it:.1f} ms: {without / with_it:.1f} times")


if __name__ == "__main__":
    main()
