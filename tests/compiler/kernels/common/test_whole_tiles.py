"""Tiles of symbolic sizes: the last one overlaps the one before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compiler.programs import as_module
from tvmify import tvmify as decorate

Moves = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    "moves",
    [
        lambda x, table: table[:, : x.shape[1]].t().contiguous(),
        lambda x, table: table[:, 5 : 5 + x.shape[1]].t().contiguous(),
        lambda x, table: x[:, :-3].t().contiguous(),
        lambda x, table: x[:, : x.shape[1] // 2].t().contiguous(),
        lambda x, table: (x + table[:, : x.shape[1]]).t().contiguous(),
    ],
    ids=["prefix", "part", "rest", "half", "sum"],
)
def test_tiles_of_a_part_end_where_the_part_does(moves: Moves) -> None:
    torch.manual_seed(0)
    fast: Any = decorate(
        as_module(moves).eval(), cache=False, compare=False, dynamic=True, strict=True
    )
    table = torch.randn(16, 64)
    with torch.inference_mode():
        for length in (12, 8, 16, 20, 13, 37):
            x = torch.randn(16, length)
            assert torch.equal(fast(x, table), moves(x, table))
    assert fast.cache_info().builds == 1
