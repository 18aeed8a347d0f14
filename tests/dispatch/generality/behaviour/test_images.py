"""Images of any height and width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.dispatch.generality.nets import check, compiled, drawn


class Sides(nn.Module):
    """Results with half and with a quarter of the rows, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.MaxPool2d(2))
        self.point = nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.down(x)
        deep = nn.functional.interpolate(self.deep(half), scale_factor=2.0, mode="nearest")
        return self.point(torch.cat([half, deep], 1))


class Segments(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.layers(x), size=x.shape[-2:], mode=self.mode)


#: How to make a module, and the number that height and width are multiples of.
IMAGES: dict[str, Any] = {
    "skips": (Sides, 4),
    "bilinear": (lambda: Segments("bilinear"), 1),
    "nearest": (lambda: Segments("nearest"), 1),
    "bicubic": (lambda: Segments("bicubic"), 1),
    "enlarged twice": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 3),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        ),
        6,
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.GroupNorm(2, 8)
        ),
        1,
    ),
    "means": (lambda: nn.AvgPool2d(3, 2, 1), 1),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 3, 2, 1, 1), nn.ReLU()
        ),
        1,
    ),
    "transposed without overlap": (lambda: nn.ConvTranspose2d(3, 4, 2, 2), 1),
}


@pytest.mark.parametrize("name", IMAGES)
def test_one_program_serves_images_of_any_size(name: str) -> None:
    torch.manual_seed(0)
    make, step = IMAGES[name]
    module = make()
    sides = {2: Dim.AUTO, 3: Dim.AUTO}
    fast = compiled(module, dynamic_shapes=(sides,))
    for height, width in ((9, 8), (8, 9), (7, 10), (15, 5), (16, 8), (17, 15)):
        check(fast, module, drawn(1, 3, height * step, width * step))
    info = fast.cache_info()
    assert (info.builds, info.eager) == (1, 0)


def test_few_image_sizes_have_separate_programs() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    fast = compiled(module)
    for size in (17, 19, 18, 23):
        check(fast, module, drawn(1, 3, size, size + 1))
    assert fast.cache_info().builds == 4
    for size in (20, 31, 33, 18, 40):
        check(fast, module, drawn(1, 3, size, size + 1))
    assert fast.cache_info().builds == 5
