"""Put a saved model into a pipeline: resize, normalise, network and argmax in one file.

It shows: what `tvmify.load` returns is a ScriptModule, which TorchScript takes like its own. The
file is loaded and called in a process that has no compiler.

    python examples/05_saved_pipeline.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tvmify
from resnet import seeded_resnet18

SERVE = """
import sys, torch, tvmify.runtime
with torch.inference_mode():
    pipeline = torch.jit.load(sys.argv[1])
    print(pipeline(torch.load(sys.argv[2])).item(), "tvm" in sys.modules)
"""


class Pipeline(nn.Module):
    """From the bytes of a photograph to the number of its class."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, network: nn.Module, side: int) -> None:
        super().__init__()
        self.network = network
        self.side = side
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    def forward(self, photograph: torch.Tensor) -> torch.Tensor:
        """Return ``(1,)`` int64 from ``(3, height, width)`` uint8."""
        pixels = photograph.unsqueeze(0).to(torch.float32) / 255
        pixels = F.interpolate(pixels, [self.side, self.side], mode="bilinear")
        return self.network((pixels - self.mean) / self.deviation).argmax(1)


@torch.inference_mode()
def main() -> None:
    """Save a network, build a pipeline around it, and call that in another process."""
    parser = argparse.ArgumentParser(description="Put a saved model into a pipeline.")
    parser.add_argument("--side", type=int, default=224, help="pixels of a side of the image")
    side = parser.parse_args().side

    network = seeded_resnet18()
    torch.manual_seed(0)
    photograph = torch.randint(0, 256, (3, 480, 640), dtype=torch.uint8)
    expected = Pipeline(network, side)(photograph).item()
    with tempfile.TemporaryDirectory() as folder:
        model, pipeline, image = (
            Path(folder, name) for name in ("model.pt", "pipeline.pt", "x.pt")
        )
        tvmify.save(network, model, example_inputs=torch.rand(1, 3, side, side))
        torch.jit.script(Pipeline(tvmify.load(model), side)).save(pipeline)
        torch.save(photograph, image)
        print(f"{pipeline.stat().st_size / 2**20:.1f} MB, for {tvmify.inspect(model)['versions']}")
        command = [sys.executable, "-W", "ignore", "-c", SERVE, str(pipeline), str(image)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert answer == [str(expected), "False"], (answer, expected)
    print(f"class {answer[0]}, as in eager PyTorch, from a process without the compiler")


if __name__ == "__main__":
    main()
