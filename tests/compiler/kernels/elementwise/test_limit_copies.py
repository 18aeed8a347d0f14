"""Chains of element-wise functions, each of which reads the one before at several positions."""

from collections.abc import Callable

import pytest
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


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (lambda x, i: x[i] * 2 + 1, 1),
        (lambda x, i: (x.exp())[i] * 2, 2),
        (lambda x, i: x.exp().flip(0).view(1, 40, 6)[:, i] * 2, 2),
        (lambda x, i: x[None].expand(9, 40, 6).gather(1, i.view(1, -1, 1).expand(9, -1, 6)) * 2, 1),
    ],
    ids=["read", "computed", "computed and moved", "repeated"],
)
def test_what_is_read_at_indices_is_computed_once(
    program: Callable[[Tensor, Tensor], Tensor], count: int
) -> None:
    torch.manual_seed(0)
    x, i = torch.randn(40, 6), torch.randint(39, (500,))
    check(program, x, i)
    rules = [*scheduled(program, x, i)[1].values()]
    assert rules.count("elementwise") == count
