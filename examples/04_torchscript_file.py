"""Compile a TorchScript file, without the Python code that it was made from.

It shows that tvmify can compile what `torch.jit.load` returns, a module without Python source.

    python examples/04_torchscript_file.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from resnet import seeded_resnet18
from stopwatch import medians, timed
from tvmify import tvmify


@torch.inference_mode()
def main() -> None:
    """Write a file, load it, compile it, and compare the three."""
    parser = argparse.ArgumentParser(description="Compile a TorchScript file.")
    parser.add_argument("--side", type=int, default=128, help="pixels of a side of the image")
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet18.pt"
        torch.jit.script(seeded_resnet18()).save(path)
        loaded = torch.jit.load(path)
    fast = tvmify(loaded, target="llvm")

    torch.manual_seed(0)
    images = torch.randn(1, 3, arguments.side, arguments.side)
    expected = loaded(images)
    logits, first = timed(lambda: fast(images))
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    assert difference < 1e-4, f"the logits differ by {difference:.1e}"
    print(f"Largest difference / largest logit: {difference:.1e}")

    later, as_loaded = medians(
        lambda: fast(images), lambda: loaded(images), rounds=arguments.rounds
    )
    print(f"first call {first:.1f} ms, later calls {later:.1f} ms, TorchScript {as_loaded:.1f} ms")


if __name__ == "__main__":
    main()
