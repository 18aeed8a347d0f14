"""Classify a photograph with one file: resize, crop, normalize, network and argmax.

It shows that `tvmify.compile` returns a TorchScript module, which can be part of a larger one. The
file is loaded and called in a process without a compiler, and in C++ (examples/cpp). The photograph
(a temple in China) comes with scikit-learn. The weights are random, but the same in each run, since
no Python package contains trained ones.

    python examples/05_predictor.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F

import tvmify
from resnet import seeded_resnet18

SERVE = """
import sys, torch, tvmify.runtime
with torch.inference_mode():
    predictor = torch.jit.load(sys.argv[1])
    print(predictor(torch.load(sys.argv[2])).item(), "tvm" in sys.modules)
"""


class Predictor(nn.Module):
    """Maps the pixels of a photograph to the number of its class."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, side: int) -> None:
        super().__init__()
        self.network = network
        self.side = side
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    def forward(self, photograph: Tensor) -> Tensor:
        """Return ``(1,)`` int64 from ``(3, height, width)`` uint8, of any size."""
        pixels = photograph.unsqueeze(0).to(torch.float32) / 255
        height, width = photograph.size(1), photograph.size(2)
        shorter, longer = self.side * 8 // 7, self.side * 8 * max(height, width) // 7
        longer = longer // min(height, width)
        size = [shorter, longer] if height < width else [longer, shorter]
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        top, left = (size[0] - self.side) // 2, (size[1] - self.side) // 2
        pixels = pixels[:, :, top : top + self.side, left : left + self.side]
        return self.network((pixels - self.mean) / self.deviation).argmax(1)


def write_ppm(path: Path, photograph: Tensor) -> None:
    """Write ``(3, height, width)`` uint8 as a binary PPM file."""
    _, height, width = photograph.shape
    pixels = photograph.permute(1, 2, 0).contiguous().numpy().tobytes()
    path.write_bytes(b"P6\n%d %d\n255\n" % (width, height) + pixels)


@torch.inference_mode()
def main() -> None:
    """Compile a network, build a predictor around it, and call the predictor in another process."""
    parser = argparse.ArgumentParser(description="Classify a photograph with one file.")
    parser.add_argument("--side", type=int, default=224, help="pixels of a side of the image")
    parser.add_argument("--folder", type=Path, help="keep predictor.pt and photograph.ppm here")
    arguments = parser.parse_args()
    side = arguments.side

    photograph = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1)  # (3, 427, 640)
    network = seeded_resnet18()
    expected = Predictor(network, side)(photograph).item()

    option = {"input_infos": [("images", (1, 3, side, side))], "num_outputs": 1}
    compiled = tvmify.compile(torch.jit.script(network), option)
    predictor = torch.jit.script(Predictor(compiled, side))

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        torch.jit.save(predictor, folder / "predictor.pt")
        torch.save(photograph, folder / "photograph.pt")
        write_ppm(folder / "photograph.ppm", photograph)
        files = [str(folder / "predictor.pt"), str(folder / "photograph.pt")]
        # A call that does not run compiled warns.
        command = [sys.executable, "-W", "error::UserWarning", "-c", SERVE, *files]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert answer == [str(expected), "False"], (answer, expected)
    print(f"class {answer[0]}, as in eager PyTorch, from a process without the compiler")


if __name__ == "__main__":
    main()
