"""``and`` and ``or`` have the value of an operand, as in Python, and not a bool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tvmify import tvmify

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Or(nn.Module):
    def forward(self, x: Tensor, k: Any = None) -> Tensor:
        k = k or 2.0
        return x * k


class OrTensor(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return (k or x) * 2


class AndTensor(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return (k and x) * 2


class OfNumbers(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        size = self.size or 5
        last = self.size and 7
        is_wide = x.dim() == 2 and x.size(1) > 2
        return x * size + last + (1 if is_wide and not (size == 5 or last == 7) else 3)


def outcome(call: Callable[..., Tensor], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("kind", [Or, OrTensor, AndTensor])
@pytest.mark.parametrize(
    "k", [torch.zeros(1), torch.full((1,), 3.0), torch.tensor(1), torch.ones(3), torch.zeros(0)]
)
@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_the_value_is_an_operand(kind: type[nn.Module], k: Tensor) -> None:
    module = kind().eval()
    with torch.inference_mode():
        expected = outcome(module, X, k)
        actual = outcome(tvmify(module, cache=False, compare=False), X, k)
    if isinstance(expected, str):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("size", [0, 3])
def test_operands_that_are_numbers_compile(size: int) -> None:
    module = OfNumbers(size).eval()
    with torch.inference_mode():
        fast = tvmify(module, cache=False, compare=False, strict=True)
        torch.testing.assert_close(fast(X), module(X))
