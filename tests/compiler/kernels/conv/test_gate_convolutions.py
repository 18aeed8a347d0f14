"""Images that are multiplied by a gate per channel, as squeeze-and-excitation does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.compiler.programs import check
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify


class Gated(nn.Module):
    """``after(x * gate(mean of x))`` for a convolution ``x`` of the input."""

    def __init__(self, channels: int, squeezed: int, after: nn.Module | None) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, channels, 1)
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)
        self.after = after

    def forward(self, image: Tensor) -> Tensor:
        x = self.before(image)
        gate = torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()))
        return x * gate if self.after is None else self.after(gate * x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("shape", "after"),
    [
        ((1, 28, 28), nn.Conv2d(96, 24, 1)),
        ((3, 7, 9), nn.Conv2d(40, 20, 1, bias=False)),  # rows of three images in one tile
        ((1, 28, 28), nn.Conv2d(240, 40, 1)),  # sums in blocks
        ((1, 7, 7), nn.Conv2d(96, 320, 1)),  # many panels
    ],
    ids=str,
)
def test_a_pointwise_convolution_fuses_the_gate(shape: tuple[int, ...], after: nn.Conv2d):
    batch, height, width = shape
    module = Gated(after.in_channels, 6, after)
    artifact = check(module, torch.randn(batch, 3, height, width))
    kernels = artifact.report["kernels"]
    assert any("gated" in name and rule == "matmul" for name, rule in kernels.items())
    assert "multiply" not in " ".join(kernels)


@pytest.mark.parametrize(
    "after", [None, nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(32, 16, 1, stride=2)], ids=str
)
def test_other_readers_of_a_gated_image(after: nn.Module | None):
    artifact = check(Gated(32, 6, after), torch.randn(1, 3, 14, 14))
    assert not any("failed" in rule for rule in artifact.report["kernels"].values())


def test_non_finite_gate():
    module = Gated(32, 6, nn.Conv2d(32, 24, 1))
    nn.init.constant_(module.excite.weight[0], float("nan"))
    x = torch.randn(1, 3, 14, 14)
    x[0, 0, 2, 2] = float("inf")
    check(module, x)


@pytest.mark.parametrize("kernel", [1, 3])
def test_scalar_is_not_a_gate(kernel: int):
    after = nn.Conv2d(32, 16, kernel)
    check(nn.Sequential(nn.Conv2d(3, 32, 1), Doubled(), after), torch.randn(1, 3, 9, 9))


def test_gated_images_of_any_height():
    torch.manual_seed(0)
    # Rows are numbered across (height - 1) // 2 + 1 lines of 6 pixels.
    module = nn.Sequential(nn.MaxPool2d(3, 2, 1), Gated(16, 6, nn.Conv2d(16, 24, 1))).eval()
    fast = tvmify(module, dynamic_shapes=({2: Dim.AUTO},), cache=False, strict=True)
    with torch.inference_mode():
        for height in (20, 7, 33):
            x = torch.randn(1, 3, height, 12)
            assert_close_to_reference(fast(x), module, (x,), {})
    assert fast.cache_info().builds == 1
    kernels = next(a for a in fast.explain().splitlines() if a.strip().startswith("kernels"))
    assert "matmul" in kernels
    assert "failed" not in kernels
