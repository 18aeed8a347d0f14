"""Layers of equal shapes and equal epilogues share one kernel, and one that packs their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from tvm import tirx

from tests.compiler.programs import scheduled
from tests.models import trained


def _linear(activation: nn.Module) -> list[nn.Module]:
    return [nn.Linear(256, 256), activation]


def _convolution() -> list[nn.Module]:
    return [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]


def _inverted_residual() -> list[nn.Module]:
    wide = nn.Conv2d(384, 384, 3, padding=1, groups=384)
    return [nn.Conv2d(64, 384, 1), nn.ReLU6(), wide, nn.ReLU6(), nn.Conv2d(384, 64, 1)]


def _transformer() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)]


def _built(parts: list[nn.Module], *shape: int) -> tuple[list[str], Counter[str]]:
    """Return the names of the functions that LLVM gets, and how many kernels have each rule."""
    ir_mod, rules = scheduled(trained(nn.Sequential(*parts)), torch.randn(*shape))
    functions = [v.name_hint for v, f in ir_mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    return sorted(functions), Counter(rules.values())


def test_equal_layers_share_one_kernel_and_one_packing():
    parts = [part for _ in range(8) for part in _linear(nn.ReLU())]
    functions, rules = _built(parts, 64, 256)
    assert len(functions) == 2
    assert rules == {"matmul": 1, "elementwise": 1}


def test_different_epilogue_adds_one_kernel():
    parts = [part for _ in range(4) for part in _linear(nn.ReLU())]
    functions, rules = _built([*parts, *_linear(nn.Sigmoid()), *_linear(nn.ReLU())], 64, 256)
    assert len(functions) == 3
    assert rules == {"matmul": 2, "elementwise": 1}


@pytest.mark.parametrize(
    ("block", "shape", "rule"),
    [
        (_convolution, (1, 64, 28, 28), "winograd"),
        (_inverted_residual, (1, 64, 14, 14), "expanded depthwise"),
        (_transformer, (1, 64, 64), "attention"),
    ],
)
def test_more_blocks_add_no_kernels(
    block: Callable[[], list[nn.Module]], shape: tuple[int, ...], rule: str
):
    two, five = (
        _built([part for _ in range(count) for part in block()], *shape) for count in (2, 5)
    )
    assert two == five
    assert rule in two[1]
