"""Programs that TVM's own passes would compute wrongly, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiler.programs import check
from tvmify import tvmify

FLIPS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeated": lambda x: x.repeat_interleave(2, 0).flip(0),
    "tiled": lambda x: x.repeat(2, 3).flip(0, 1),
    "twice": lambda x: x.flip(0).repeat_interleave(2, 0).flip(0),
    "expanded": lambda x: x.unsqueeze(1).expand(4, 2, 32).reshape(8, 32).flip(0),
    "flat": lambda x: x.flip(1).reshape(-1).flip(0).reshape(32, 4).flip(0, 1),
    "sliced": lambda x: x.repeat_interleave(4, 1).flip(1)[:, 1::3].repeat_interleave(2, 1).flip(1),
    "product": lambda x: torch.kron(x, torch.ones(2, 2)).flip(0),
    "one axis": lambda x: x[0, :4].repeat(2).flip(0),
    "upsampled": lambda x: F.interpolate(x[None, None], scale_factor=3.0).flip(2),
    "rotated": lambda x: F.interpolate(x[None, None], scale_factor=2.0).rot90(1, (2, 3)),
    "shuffled": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2).flip(2, 3),
}


@pytest.mark.parametrize("function", FLIPS.values(), ids=FLIPS)
def test_quotients_of_a_decreasing_index(function: Callable[[Tensor], Tensor]):
    check(function, torch.randn(4, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [torch.exp, F.gelu, torch.sigmoid])
def test_functions_of_comparisons(function: Callable[[Tensor], Tensor], dtype: torch.dtype):
    check(lambda x: function((x > 1).to(dtype)), torch.randn(3, 40))
    check(lambda x: function(((x > 0).sum(2) > 1).to(dtype)), torch.randn(3, 40, 4))


def test_divisions_of_comparisons():
    check(lambda x: torch.remainder((x > 0).long(), 3), torch.randn(3, 40))
    check(lambda i: F.one_hot(i, 7) // 3, torch.arange(5))


def test_conditions_within_conditions():
    """TVM simplifies each for both values of the next: inlined, this takes forever."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.where(torch.isnan(x) | (x > y), x + y, x - y)
        return x

    check(program, torch.randn(5, 5), torch.randn(5, 5))


def test_buckets_of_distances_of_any_length():
    """As in WavLM. If one condition became two, TVM refused the ranges of their logarithms."""

    def program(x: Tensor) -> Tensor:
        length = x.shape[1]
        distance = (torch.arange(length)[None] - torch.arange(length)[:, None]).abs()
        far = (8 + torch.log(distance.float() / 8) / math.log(16) * 8).long()
        far = torch.min(far, torch.full_like(far, 15))
        return torch.where(distance < 8, distance, far) + x.sum()

    fast = tvmify(program, dynamic=True, strict=True, cache=False)
    for length in (5, 9, 40):
        x = torch.randn(1, length)
        torch.testing.assert_close(fast(x), program(x))
    assert fast.cache_info().builds == 1


@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("columns", [30, 62, 129])
def test_borders_in_bfloat16(columns: int, value: float):
    x = torch.randn(3, columns).bfloat16()
    check(lambda x: F.pad(x, [2, 3], value=value), x)


def test_a_bfloat16_number_without_axes_is_repeated():
    check(lambda x: (x.repeat_interleave(2), x.expand(3, 40).clone()), torch.tensor(1.7).bfloat16())
