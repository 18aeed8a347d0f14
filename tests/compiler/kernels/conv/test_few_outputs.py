"""Convolutions to fewer channels than a vector has lanes: one product, and sums over windows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import relax
from tvm.ir import Expr

from tests.compiler import programs, symbolic
from tests.compiler.kernels.kernels import Array, random
from tests.compiler.programs import compiled, executed


def _is_used(module: nn.Module, x: torch.Tensor) -> bool:
    return any("window_sums" in name for name in compiled(module, x).report["kernels"])


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(20, 3, 3, padding=1), (2, 20, 9, 11)),
        (nn.Conv2d(20, 2, (2, 5), padding=(0, 3), dilation=(2, 1), bias=False), (1, 20, 9, 8)),
        (nn.Conv2d(33, 1, 4, padding=2), (1, 33, 7, 5)),
        (nn.Conv1d(32, 1, 7, padding=3), (2, 32, 40)),
        (nn.Conv2d(20, 3, 3, padding=1).double(), (1, 20, 6, 6)),
    ],
    ids=str,
)
def test_few_channels(module: nn.Module, shape: tuple[int, ...]):
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)
    artifact = programs.check(module, x)
    assert any("window_sums" in name for name in artifact.report["kernels"])


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(16, 16, 3),
        nn.Conv2d(16, 3, 3, stride=2),
        nn.Conv2d(16, 4, 3, groups=2),
        nn.Conv2d(3, 3, 3),
        nn.Conv2d(16, 3, 1),
    ],
    ids=str,
)
def test_others_are_computed_directly(module: nn.Module):
    channels, dtype = module.in_channels, module.weight.dtype
    assert not _is_used(module, torch.randn(1, channels, 9, 9, dtype=dtype))


def test_sizes_that_vary():
    weight = random(3, 40, 3, 3, seed=1) / 8

    def describe(_: relax.BlockBuilder, x: Expr, w: Expr) -> Expr:
        return relax.op.nn.relu(relax.op.nn.conv2d(x, w, padding=[1, 1]))

    def reference(x: Array, w: Array) -> Array:
        return F.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1).relu().numpy()

    program = symbolic.build(describe, [((2, 40, "h", "w"), "float32")], [weight], hint=9)
    assert any("window_sums" in name for name in program.report)
    for height, width in [(2, 5), (9, 9), (17, 8)]:
        image = random(2, 40, height, width)
        symbolic.check(program, reference, [image], [weight], tolerance=1e-5)


def test_padding_multiplies_nothing():
    module = nn.Conv2d(20, 3, 3, padding=1)
    nn.init.constant_(module.weight, math.inf)
    x = torch.ones(1, 20, 5, 5)
    assert executed(compiled(module, x), module, x).isinf().all()
