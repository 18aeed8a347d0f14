"""Statistics of numbers with a large common offset, or all equal, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.compiler.programs import compiled, executed
from tests.tolerances import POLICY

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], float]] = {
    "batch norm": (nn.BatchNorm2d(4, track_running_stats=False), (2, 4, 9, 9), 500.0),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 9, 9), 500.0),
    "group norm of rows": (nn.GroupNorm(2, 4), (2, 4, 50), 500.0),
    "instance norm": (nn.InstanceNorm2d(4), (2, 4, 9, 9), 500.0),
    "layer norm": (nn.LayerNorm(100), (8, 100), 1e4),
    "layer norm of two axes": (nn.LayerNorm((7, 9)), (8, 7, 9), 100.0),
    "std of columns": (lambda x: x.std(0), (8, 300), 1e4),
    "std of rows": (lambda x: x.std(1), (8, 300), 1e4),
    "var of all": (lambda x: x.var(), (8, 300), 1e4),
    "var and mean": (lambda x: torch.var_mean(x, 1), (8, 300), 1e3),
}


def errors(function: Callable[..., Any], x: torch.Tensor) -> list[tuple[float, float, float]]:
    """Return, for each result, our error, eager's error, and the largest number."""
    if isinstance(function, nn.Module):
        function.eval().float()
    with torch.no_grad():
        got = pytree.tree_leaves(executed(compiled(function, x), function, x))
        want = pytree.tree_leaves(function(x))
        wide = function.double() if isinstance(function, nn.Module) else function
        exact = pytree.tree_leaves(wide(x.double()))
    return [
        ((g - r).abs().max().item(), (w - r).abs().max().item(), r.abs().max().item())
        for g, w, r in zip(got, want, exact, strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_offsets_lose_no_more_precision_than_eager(name: str):
    torch.manual_seed(0)
    function, shape, offset = CASES[name]
    times, share = POLICY["default"]
    for error, of_eager, largest in errors(function, torch.randn(shape) + offset):
        assert error <= max(times * of_eager, share * largest)


@pytest.mark.parametrize("number", [3.3, 3e38])
@pytest.mark.parametrize("size", [64, 65])
def test_layer_norm_of_equal_numbers_is_zero(size: int, number: float):
    (found,) = errors(nn.LayerNorm(size), torch.full((8, size), number))
    assert found[0] == 0


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("shape", [(1, 4, 130), (2, 4, 9, 9), (2, 4, 3, 9, 9)], ids=len)
def test_group_norm_of_equal_numbers_is_zero(shape: tuple[int, ...], groups: int):
    norm = nn.GroupNorm(groups, 4)
    (found,) = errors(norm, torch.full(shape, 33333.3))
    assert found[0] < 1e-6  # of float64


def test_deviations_of_huge_equal_numbers_are_zero():
    (found,) = errors(lambda x: x.std(0), torch.full((8, 30), 3e38))
    assert found[0] == 0
