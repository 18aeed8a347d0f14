"""Bools that one kernel of a program stores and others read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compiler.programs import check

READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "sum": torch.add,
    "product": torch.mul,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.bitwise_xor,
    "not": lambda a, b: ~a,
    "chosen": lambda a, b: torch.where(a, b, ~b),
    "compared": torch.lt,
    "moved": lambda a, b: a.flip(0) & b,
    "any": lambda a, b: a.any(1),
    "number": lambda a, b: a.float() - 2.0,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_readers_in_vectors(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        m = torch.minimum(x, b)
        stored = m != -1
        return read(stored, b), torch.isnan(stored), torch.roll(m, [0], [-2])

    x, b = torch.linspace(-2, 1, 192).reshape(8, 8, 3), torch.arange(192).reshape(8, 8, 3) % 5 == 0
    x[:, 0] = -1
    check(program, x, b)
    check(program, x[:5, :3], b[:5, :3])
