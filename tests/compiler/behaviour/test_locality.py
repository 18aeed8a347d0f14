"""NaN and infinities spread no further than in eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.programs import compiled, executed

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "linear": (lambda x: F.interpolate(x, size=7, mode="linear"), (1, 2, 4)),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 8), mode="bilinear"), (1, 2, 3, 4)),
    "trilinear": (lambda x: F.interpolate(x, size=(5, 7, 8), mode="trilinear"), (1, 2, 2, 3, 4)),
    "factor": (lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), (1, 2, 4)),
    "transposed convolution": (nn.ConvTranspose2d(2, 3, 3, stride=2).eval(), (1, 2, 5, 5)),
    "adaptive mean": (lambda x: F.adaptive_avg_pool1d(x, 7), (1, 2, 4)),
    "adaptive mean of images": (lambda x: F.adaptive_avg_pool2d(x, (7, 3)), (1, 2, 4, 5)),
}


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", CASES)
def test_one_number_that_is_not_finite_spreads_no_further_than_in_eager(name: str, number: float):
    function, shape = CASES[name]
    x = torch.rand(shape)
    run = compiled(function, x)
    for place in (1, x.numel() // 2, -1):
        changed = x.clone()
        changed.view(-1)[place] = number
        got = executed(run, function, changed).isfinite()
        assert not got.all()
        assert got[function(changed).isfinite()].all()
