"""Consecutive small kernels are merged into one function."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim
from tvm import tirx

from tests.compiler.programs import check, compiled, executed, scheduled
from tvmify import tvmify


def gathers(x: torch.Tensor, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    rows = [torch.nn.functional.embedding(at[:, i], table) for i in range(4)]
    return torch.stack([x, *rows], 1).softmax(-1).cumsum(1)


class Residual(torch.nn.Module):
    """Convolutions of an image with one row of tiles: its Winograd kernels start no threads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x) + x)
        return x


ARGS = torch.randn(1, 8), torch.randn(10, 8), torch.randint(10, (1, 4))


def test_gathers_are_one_function():
    planned, rules = scheduled(gathers, *ARGS)
    left = [f for _, f in planned.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert len(left) <= 2 < len(rules)
    check(gathers, *ARGS)


def test_positions_are_still_checked():
    artifact = compiled(gathers, *ARGS)
    with pytest.raises(Exception, match="out of range"):
        executed(artifact, gathers, *ARGS[:2], torch.tensor([[0, 1, 2, 10]]))


def test_double_store_does_not_reuse_operand_memory():
    module = Residual().eval()
    x = torch.randn(1, 64, 4, 64)
    x[0, 3, 1, 5] = float("inf")
    with torch.no_grad():
        artifact = compiled(module, x)
        actual, expected = executed(artifact, module, x), module(x)
    assert "winograd" in artifact.report["kernels"].values(), artifact.report
    assert 0 < (~expected.isfinite()).sum() < expected.numel() / 2
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def beams(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores, at = x.flatten(1).topk(3, 1)
    return scores, at % 8, x.gather(1, (at // 8).unsqueeze(-1).expand(-1, -1, 8))


def test_kernels_may_spell_a_size_in_several_ways():
    sides = ({0: Dim.AUTO, 1: Dim.AUTO},)
    fast = tvmify(beams, dynamic_shapes=sides, strict=True, cache=False, compare=False)
    for shape in ((4, 5, 8), (3, 6, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), beams(x), rtol=0, atol=0)
    assert fast.cache_info().builds == 1
