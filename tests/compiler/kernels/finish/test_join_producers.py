"""The operands of a sum are computed in the loop that sums them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.programs import check, scheduled

Function = Callable[..., Tensor]

SUMS: dict[str, Function] = {
    "norm of rows": lambda x: x.pow(2).sum(-1).sqrt(),
    "norm of columns": lambda x: torch.linalg.vector_norm(x, dim=1),  # sums of sums
    "similarity": lambda x: (x * (x + 1)).sum(-1),
    "root mean square": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "means of columns": lambda x: (2 * x - 1).mean((0, 1)),
    "broadcast": lambda x: (x * x.mean(1, keepdim=True)).sum(1),
    "position": lambda x: x.argmax(-1),
}


def _rules(function: Function, *args: Tensor) -> dict[str, str]:
    class Module(nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return function(*args)

    return scheduled(Module(), *args)[1]


@pytest.mark.parametrize("name", SUMS)
def test_summands_are_not_materialized(name: str):
    x = torch.randn(3, 200, 70)
    check(SUMS[name], x)
    rules = _rules(SUMS[name], x)
    alone = [name for name, rule in rules.items() if rule == "elementwise"]
    assert not [name for name in alone if name.endswith(("multiply", "subtract", "candidates"))]
    assert {"reduction", "column reduction"} & set(rules.values())


@pytest.mark.parametrize("shape", [(1, 64, 14, 14), (2, 24, 9, 33)])
def test_group_norms_write_no_squares(shape: tuple[int, ...]):
    norm = nn.GroupNorm(8, shape[1])
    x = torch.randn(shape)
    check(norm, x)
    _, rules = scheduled(norm.eval(), x)
    assert not [name for name, rule in rules.items() if name.endswith("multiply")]
    assert sum("multiply_mean" in name for name in rules) == 1


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: ((y := x.exp()), y.sum(-1)), id="read twice"),
        pytest.param(lambda x: x.exp().softmax(-1), id="in several stages"),
        pytest.param(lambda x: F.avg_pool2d(x.exp(), 3, 1), id="several times each"),
        pytest.param(lambda x: x.exp().cumsum(-1), id="in order"),
        pytest.param(lambda x: x.exp().cumsum(1).sum(), id="by a kernel without axes"),
    ],
)
def test_shared_operand_is_computed_once(function: Function):
    x = torch.randn(3, 20, 70)
    check(function, x)
    assert "elementwise" in _rules(function, x).values()
