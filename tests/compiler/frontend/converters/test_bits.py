"""Logic and shifts of integers, and reinterpreted bits."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.programs import check, check_each, compiled, executed
from tvmify.errors import UnsupportedOperator

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts(dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    x = torch.randint(-(2**62), 2**62, (3, bits + 4)).to(dtype)
    x[0, :2] = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max])
    counts = torch.arange(-2, bits + 2).to(dtype)

    def by_numbers(x: torch.Tensor) -> list[torch.Tensor]:
        numbers = (0, 1, bits - 1, bits, -1)
        return [y for n in numbers for y in (x << n, x >> n, (x << n) >> n)]

    check_each(
        {
            "numbers": by_numbers,
            "tensors": lambda x: (x << counts, x >> counts, torch.bitwise_right_shift(77, counts)),
            "halves": lambda x: ((x & 15) - 8, (x >> 4) & 15, (x << 4) >> 4),
        },
        x,
    )


def test_numbers_outside_of_the_type_wrap_around():
    x = torch.randint(-(2**31), 2**31, (4, 8)).int()
    check(lambda x: (x & 0xFFFFFFFF, x ^ (1 << 31), x | 2**40), x)


@pytest.mark.parametrize("source", INTEGERS + FLOATS, ids=str)
def test_views_as_another_type(source: torch.dtype) -> None:
    x = torch.randint(0, 60, (3, 64), dtype=torch.uint8).view(source)

    def views(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x + 0).view(dtype) for dtype in INTEGERS + FLOATS] + [x.view(torch.int16) + 1]

    got = executed(compiled(views, x), views, x)
    assert all(map(torch.equal, got, views(x)))
    assert [y.dtype for y in got] == [y.dtype for y in views(x)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
def test_other_views_are_refused(dtype: torch.dtype) -> None:
    x = torch.ones(3, 8, dtype=torch.uint8)
    with pytest.raises(UnsupportedOperator, match="view"):
        compiled(lambda x: (x + 1).view(dtype), x)
