"""Chains of element-wise functions, each of which reads the one before at several positions."""

import torch
from torch import Tensor

from tests.compiler.programs import check, scheduled


def _scan(x: Tensor) -> Tensor:
    """Write to parts of a tensor repeatedly, as in a parallel prefix sum."""
    x = x.clone()
    for step in range(12):
        x[:, step % 4].add_(x[:, (step + 1) % 4] * 0.5)
    return x


def test_a_long_chain_of_writes_is_not_one_kernel() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 16)
    check(_scan, x)
    assert 1 < len(scheduled(_scan, x)[1]) < 12
