"""Zeros have the same sign as in eager; a product with zero may be NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.programs import compiled, executed
from tests.pytorch import IS_2_11

ZEROS = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 0.5, -0.5, 2.0, -3.0]
Function = Callable[..., torch.Tensor]

OF_ONE: dict[str, Function] = {
    "abs": torch.abs,
    "added": lambda x: x + 0.0,
    "added_behind": lambda x: x.ceil() + 0.0,
    "added_first": lambda x: 0 + x,
    "added_minus_zero": lambda x: x + (-0.0),
    "added_zeros": lambda x: x + torch.zeros_like(x),
    "ceil": torch.ceil,
    "clamp": lambda x: x.clamp(0, 1),
    "clamp_max": lambda x: x.clamp_max(-0.0),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "divided_by_one": lambda x: x / 1,
    "floor": torch.floor,
    "from_minus_zero": lambda x: -0.0 - x,
    "from_zero": lambda x: 0.0 - x,
    "from_zeros": lambda x: torch.zeros_like(x) - x,
    # eager PyTorch 2.11 loses the sign
    **({} if IS_2_11 else {"frac": torch.frac}),
    "hardtanh": lambda x: F.hardtanh(x, 0, 1),
    "leaky_relu": F.leaky_relu,
    "less_itself": lambda x: x - x,
    "neg": torch.neg,
    "product_with_zero": lambda x: x * 0,
    "product_with_zeros": lambda x: x * torch.zeros_like(x),
    "quotient_of_zero": lambda x: 0 / x,
    "quotient_of_zeros": lambda x: torch.zeros_like(x) / x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "round": torch.round,
    "rsub": lambda x: torch.rsub(x, 0.0),
    "sign": torch.sign,
    "sub_minus_zero": lambda x: x - (-0.0),
    "sub_no_multiple": lambda x: torch.sub(x, x, alpha=0),
    "sub_zero": lambda x: x - 0.0,
    "tanh": lambda x: torch.tanh(x * 0),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0),
    "trunc": torch.trunc,
}
OF_TWO: dict[str, Function] = {
    "add": torch.add,
    "copysign": torch.copysign,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "fmod": torch.fmod,
    "mul": torch.mul,
    "remainder": torch.remainder,
    "sub": torch.sub,
    "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


def same_bits(functions: dict[str, Function], *args: torch.Tensor) -> None:
    def all_of(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(*given) for name, function in functions.items()}

    got, want = executed(compiled(all_of, *args), all_of, *args), all_of(*args)
    for name, expected in want.items():
        numbers = ~expected.isnan()
        assert torch.equal(got[name].isnan(), ~numbers), (name, got[name], expected)
        assert torch.equal(got[name][numbers], expected[numbers]), (name, got[name], expected)
        signs = (torch.signbit(each)[numbers] for each in (got[name], expected))
        assert torch.equal(*signs), (name, got[name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [5, 17])
def test_functions_of_one_argument(length: int, dtype: torch.dtype):
    same_bits(OF_ONE, torch.tensor((ZEROS * 4)[:length], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_two_arguments(dtype: torch.dtype):
    x, y = torch.cartesian_prod(*[torch.tensor(ZEROS, dtype=dtype)] * 2).unbind(1)
    same_bits(OF_TWO, x.contiguous(), y.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extrema_of_signed_zeros_return_the_first(dtype: torch.dtype):
    """As in eager's scalar code; its vector code returns the second."""
    functions: dict[str, Function] = {
        "clamp_max": lambda x, y: torch.clamp(x, max=y),
        "clamp_min": lambda x, y: torch.clamp(x, min=y),
        "maximum": torch.maximum,
        "minimum": torch.minimum,
    }
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    same_bits(functions, zeros, -zeros)
