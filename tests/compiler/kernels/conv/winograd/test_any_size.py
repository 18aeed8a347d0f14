"""Winograd convolutions of images of any size: values, tails, NaN and infinity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.kernels.conv.winograd.any_size import AnySize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(20, 32, 3, padding=1)
        self.short = nn.Conv2d(20, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x) + self.short(x))


def _compiled(module: nn.Module, side: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compile a convolution in tiles of side × side results."""
    monkeypatch.setattr(AnySize, "nanoseconds", lambda self, machine: -float(self.height == side))
    sides = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    return tvmify(module.eval(), dynamic_shapes=sides, cache=False, strict=True)


@pytest.mark.parametrize("side", [2, 4])
def test_one_program_serves_all_sizes(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Block()
    fast = _compiled(module, side, monkeypatch)
    with torch.inference_mode():
        for n, height, width in ((2, 9, 8), (3, 7, 10), (2, 16, 5), (2, 3, 23)):
            x = torch.randn(n, 20, height, width)
            assert_close_to_reference(fast(x), module, (x,), {})
        # NaN and infinity affect only their windows.
        x = torch.randn(2, 20, 9, 10)
        x[0, 3, 5, 6], x[1, 0, 8, 9] = float("nan"), float("inf")
        expected, result = module(x), fast(x)
        finite = expected.isfinite()
        assert torch.equal(result.isfinite(), finite)
        torch.testing.assert_close(result[finite], expected[finite], rtol=1e-4, atol=1e-4)
    assert fast.cache_info().builds == 1
    assert "winograd results" in str(fast.explain())
