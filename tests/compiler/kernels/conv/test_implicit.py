"""Convolutions of images of any size as products of their windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.kernels.conv.implicit import Implicit

SIZES = ((2, 9, 8), (3, 7, 10), (2, 16, 5))


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(6, 9, 3, padding=1),
        nn.Conv2d(6, 9, 3, stride=2, padding=(0, 2), dilation=(2, 1)),
        nn.Conv2d(6, 9, 1, stride=2),
        nn.Conv2d(6, 1, 1),
        nn.Conv2d(6, 9, 3, padding=1, dtype=torch.bfloat16),
    ],
    ids=["padded", "strided", "points", "one channel", "bfloat16"],
)
def test_one_program_serves_all_sizes(module: nn.Conv2d, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Implicit, "nanoseconds", lambda self, machine: -1.0)
    torch.manual_seed(0)
    nn.init.normal_(module.weight)
    whole = nn.Sequential(module, nn.ReLU()).eval()
    sides = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    fast = tvmify(whole, dynamic_shapes=sides, cache=False, strict=True)
    with torch.inference_mode():
        for n, height, width in SIZES:
            x = torch.randn(n, 6, height, width, dtype=module.weight.dtype)
            assert_close_to_reference(fast(x), whole, (x,), {})
    assert fast.cache_info().builds == 1
    assert "matmul" in str(fast.explain())
