"""Casts are done, also within a kernel and for numbers that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compiler.programs import compiled, executed
from tvmify.errors import UnsupportedOperator

#: With a vector, a part of one, and a tail.
LENGTHS = (1, 7, 17, 40)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
OUTSIDE = [-110.0, -1.0, 300.0, 1000.0, 7.5, -0.5, 40000.0, 5e9 + 7, -5e9, 2.0**40 + 77, 1e19]
OUTSIDE += [float("inf"), float("-inf"), float("nan"), 2.0**31, -(2.0**31), 2.0**63, -1e30]
#: Between two bfloat16 numbers, halfway between, beyond the largest, denormal, and zero.
BETWEEN = [3.1415926, 1.00390625, 1.01171875, -0.1, 3.4e38, -3.4e38, 1e-40, -0.0, 65520.0]
BETWEEN += [float("inf"), float("-inf"), float("nan")]


def equal_in_each(functions: dict[str, Callable[..., Any]], *args: torch.Tensor) -> None:
    def all_of(*given: torch.Tensor) -> dict[str, Any]:
        return {name: function(*given) for name, function in functions.items()}

    got, want = executed(compiled(all_of, *args), all_of, *args), all_of(*args)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype, name
        same = torch.equal(torch.nan_to_num(got[name], 77), torch.nan_to_num(expected, 77))
        assert same, f"{name}: {got[name]} instead of {expected}"
        if expected.is_floating_point():
            assert torch.equal(got[name].isnan(), expected.isnan()), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_out_of_range_floats_to_integers(dtype: torch.dtype):
    # All lengths in one program: results of a cast must not depend on their neighbours.
    x = torch.tensor(OUTSIDE * 3, dtype=torch.float64).to(dtype)
    functions: dict[str, Callable[..., Any]] = {
        f"{kind} of {length}": lambda x, kind=kind, length=length: x[:length].to(kind)
        for kind in INTEGERS
        for length in LENGTHS
    }
    equal_in_each(functions, x)


def test_casts_there_and_back_within_one_kernel():
    x = torch.tensor(OUTSIDE)
    functions: dict[str, Callable[..., Any]] = {
        f"{kind}": lambda x, kind=kind: x.to(kind).float() * 2 for kind in INTEGERS
    }
    equal_in_each(functions | {"bool": lambda x: x.bool().float() * 2}, x)


HALVES: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "there and back": lambda x, kind: x.to(kind).float(),
    "product": lambda x, kind: (x.to(kind) * 3).float(),
    "chain": lambda x, kind: ((x.to(kind) * 3 + 1) / 7 - 2).float(),
    "integer": lambda x, kind: (x.clamp(-9, 9).to(kind) * 100).to(torch.int32),
    "comparison": lambda x, kind: x.to(kind) == x,
    "residue": lambda x, kind: x - x.to(kind).float(),
    "twice": lambda x, kind: x.to(kind).float().to(kind).float() * x,
    "constant": lambda x, kind: x * torch.full((1,), 0.1, dtype=kind).float(),
    "sum of two": lambda x, kind: (x.to(kind) + x.flip(0).to(kind)).float() - x,
    "of doubles": lambda x, kind: x.double().to(kind).double() + 0.5,
    "of integers": lambda x, kind: (x.clamp(-9, 9) * 1e8).long().to(kind).float() + 1,
    "kept": lambda x, kind: x.to(kind),
    "maxima": lambda x, kind: x.to(kind).amax().float() - x,
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_rounded_at_each_cast(kind: torch.dtype, length: int):
    x = torch.tensor((BETWEEN * 4)[:length])
    functions = {
        name: lambda x, function=function: function(x, kind) for name, function in HALVES.items()
    }
    equal_in_each(functions, x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16], ids=str)
def test_types_that_compiled_code_lacks_are_refused_between_operators(dtype: torch.dtype):
    with pytest.raises(UnsupportedOperator, match=str(dtype)):
        compiled(lambda x: x.to(dtype).float() * 2, torch.tensor([1.1, 300.0]))
