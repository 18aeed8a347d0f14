"""A test process of ``tvmify doctor``: compile or load a small module, and print its result."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import tvmify


class Small(nn.Module):
    """A convolution and a matrix product, which exercise most of the installation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four numbers for an image."""
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


def main(step: str) -> None:
    """Run the module; ``step`` says whether its code must be ``compiled`` or ``loaded``."""
    torch.manual_seed(0)
    plain, x = Small().eval(), torch.randn(1, 3, 16, 16)
    # `strict`, so that a failure raises, with its next step.
    module: Any = tvmify.tvmify(plain, strict=True)
    with torch.inference_mode():
        result, expected = module(x), plain(x)
    torch.testing.assert_close(result, expected)
    info = module.cache_info()
    if (info.builds, info.disk_hits) != ((1, 0) if step == "compiled" else (0, 1)):
        raise RuntimeError(f"it was not {step}: {info}")
    if step == "loaded" and "tvm" in sys.modules:
        raise RuntimeError("TVM's compiler was imported, although the process only loads")
    sys.stdout.write(repr(result.tolist()))
