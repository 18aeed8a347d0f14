"""Integers that overflow wrap around, whatever the program computes from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tvm import relax

from tests.compiler.kernels.kernels import build
from tests.compiler.programs import compiled, executed

TABLE = torch.arange(5000.0)
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum and what it was": lambda x: x + 1 > x,
    "difference and what it was": lambda x: x - 1 < x,
    "double and half": lambda x: x * 2 // 2,
    "negative": lambda x: -x < 0,
    "absolute": lambda x: x.abs() >= 0,
    "square": lambda x: x * x >= 0,
    "power": lambda x: x**3 > x,
    "sum, limited": lambda x: (x + 1).clamp(min=0, max=10),
    "larger": lambda x: torch.maximum(x + 5, x),
    "selected": lambda x: torch.where(x + 1 > x, x + 1, x),
    "scaled": lambda x: torch.add(x, x, alpha=3) > x,
    "halves of a difference": lambda x: (5 - x) // 2,
    "parity": lambda x: (x * 6 + 4) % 2,
    "multiple": lambda x: (x + 3) // 4 * 4,
    "times what its type lacks": lambda x: x * (3 * torch.iinfo(x.dtype).max // 2 % 2**62),
    "two tensors": lambda x: (x + x.flip(0)) // 2,
    "total": lambda x: (x * x).sum(dtype=x.dtype) % 1000,
    "running total": lambda x: x.cumsum(0, dtype=x.dtype) % 10,
    "cast": lambda x: (x + 1).to(torch.int32) > 0,
    "lowest": lambda x: x == torch.iinfo(x.dtype).min,
    "not lowest": lambda x: x != torch.iinfo(x.dtype).min,
    "at most lowest": lambda x: x <= torch.iinfo(x.dtype).min,
    "above lowest": lambda x: x > torch.iinfo(x.dtype).min,
    "plus lowest": lambda x: x + torch.iinfo(x.dtype).min,
}
HASHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hash": lambda x: (x * 1000003 + 7) % 5000,
    "mixed": lambda x: ((x * 1000000007) ^ (x >> 3)) % 1009,
    "entry of a hash": lambda x: TABLE[(x * 1000003) % 5000],
    "shifted": lambda x: (x << 5) + x,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_wrap(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    limits = torch.iinfo(dtype)
    extremes = [limits.max, limits.min, limits.max - 1, limits.min + 1, limits.max // 2 + 1, 0, 1]
    numbers = torch.randint(limits.min, limits.max, (33,), dtype=dtype)  # vectors and a tail
    x = torch.cat([torch.tensor(extremes, dtype=dtype), numbers])
    programs = PROGRAMS | (HASHES if dtype in (torch.int32, torch.int64) else {})

    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: program(x) for name, program in programs.items()}

    got, want = executed(compiled(function, x), function, x), function(x)
    for name, expected in want.items():
        assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_quotients_are_floored(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    limits = torch.iinfo(dtype)
    extremes = torch.tensor([limits.max, limits.min, limits.min + 1, 0, 1], dtype=dtype)
    x = torch.cat([extremes, torch.randint(limits.min, limits.max, (33,), dtype=dtype)])
    divisors = torch.randint(1, 9, x.shape).to(dtype)
    if limits.min < 0:
        divisors = torch.where(torch.arange(len(x)) % 2 == 0, divisors, -divisors - 1)

    def each(x: torch.Tensor, divisors: torch.Tensor) -> dict[str, torch.Tensor]:
        chain = x
        for _ in range(8):
            chain = torch.div(chain - 1, 3, rounding_mode="floor") + 1
        return {
            "by a number": x // 3,
            "remainder by a number": x % 7,
            "by a power of two": x // 4,
            "by numbers": x // divisors,
            "remainders by numbers": x % divisors,
            "of one that is not negative": (x & 15) // 3,
            "eight": chain,
        }

    got, want = executed(compiled(each, x, divisors), each, x, divisors), each(x, divisors)
    for name, expected in want.items():
        assert torch.equal(got[name], expected), name


def test_code_of_nested_quotients_grows_with_their_number() -> None:
    def length(times: int) -> int:
        def describe(builder, x):
            for _ in range(times):
                x = builder.emit(relax.op.floor_divide(x, relax.const(3, "int64")))
            return x

        return len(build(describe, [np.arange(64)]).lowered()["main"].script())

    first, second, third = (length(times) for times in (2, 5, 8))
    assert third - second < 1.5 * (second - first)
