"""Python numbers among the arguments: one program for any value, if only arithmetic uses them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.pytorch import IS_2_11
from tvmify import tvmify as decorate
from tvmify.dispatch.generality import numbers

X = torch.linspace(-1, 1, 12).reshape(3, 4)
VALUES = [0.1, 1 / 3, -0.0, 1e-50, 3e38, math.inf, -math.inf, math.nan, 16777217.0]


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale


def same(ours: torch.Tensor, eager: torch.Tensor) -> bool:
    known = ~eager.isnan()
    return (
        ours.dtype == eager.dtype
        and torch.equal(ours.isnan(), eager.isnan())
        and torch.equal(ours[known], eager[known])
        and torch.equal(ours[known].signbit(), eager[known].signbit())
    )


ARITHMETIC: dict[str, Callable[[Any, float], Any]] = {
    "x * f": lambda x, f: x * f,
    "f * x": lambda x, f: f * x,
    "x + f": lambda x, f: x + f,
    "f - x": lambda x, f: f - x,
    "x - f": torch.sub,
    "x / f": lambda x, f: x / f,
    "f / x": lambda x, f: f / x,
    "x * (1 - f)": lambda x, f: x * (1 - f),
    "-f + 0.5": lambda x, f: x * (-f + 0.5),
    "x * (f * 3)": lambda x, f: x * (f * 3),
    "f / 7": lambda x, f: x + f / 7,
    "a tensor": lambda x, f: x + torch.tensor(f),
    "a tensor of a type": lambda x, f: x + torch.scalar_tensor(f, dtype=torch.float64),
    "a list": lambda x, f: x * torch.as_tensor([f, 1.0, f, 2]),
    "full tensors": lambda x, f: (
        torch.cat([torch.full((1, 4), f), torch.full_like(x, f), x.new_full((2, 4), f)]) - 1
    ),
    "comparisons": lambda x, f: ((x < f) + 2 * (f <= x)) * (x != f) + 4 * torch.gt(x, f),
    "a minimum": lambda x, f: x.clamp(min=f) * 2,
    "a maximum": lambda x, f: x.clamp_max(-f) * 2,
    "limits": lambda x, f: torch.clamp(x.double(), f, 3 * f) * 2,
    "a choice": lambda x, f: torch.where(x > 0, x, f) + torch.where(x > f, 1, 2) * 0,
    "a filling": lambda x, f: x.masked_fill(x > 0.5, f) * 2,
    "limits in place": lambda x, f: (x + 1).clamp_(min=f).clamp_max_(-f),
    "a filling in place": lambda x, f: (x + 1).masked_fill_(x > 0.5, f) * 2,
    "a threshold": lambda x, f: torch.nn.functional.threshold(x, f, -f) * 2,
    "a slope": lambda x, f: torch.nn.functional.leaky_relu(x, f) * 2,
    "a remainder": lambda x, f: x % f + torch.fmod(x, f),
    "a whole quotient": lambda x, f: x // f + torch.div(x, -f, rounding_mode="trunc"),
    "a border": lambda x, f: torch.nn.functional.pad(x, (1, 2, -1, 1), value=f),
    "elements": lambda x, f: _marked(x * 2, f) + torch.zeros_like(x).fill_(f),
    "a magnitude": lambda x, f: x * abs(f) * abs(-f),
}


def _marked(x: torch.Tensor, f: float) -> torch.Tensor:
    x[1:, ::2] = f
    return x


def _assigned(x: torch.Tensor, f: float) -> torch.Tensor:
    x *= f
    x += f
    x /= f
    x -= f
    return x


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_one_program_serves_all_values(name: str, inference: None) -> None:
    function = ARITHMETIC[name]
    fast: Any = decorate(function, strict=True)
    for value in VALUES:
        result = fast(X, value)
        # eager PyTorch 2.11 ignores a minimum that is NaN
        if not (IS_2_11 and name == "a minimum" and math.isnan(value)):
            assert same(result, function(X, value)), value
    info = fast.cache_info()
    assert (info.builds, info.entries, info.misses) == (1, 1, 1)


#: Operators that multiply by the number: LLVM may fuse this with an addition, as eager may.
WEIGHTED: dict[str, Callable[[Any, float], Any]] = {
    "arithmetic in place": lambda x, f: (x + 1).mul_(f).add_(f).div_(f).sub_(f),
    "assignments": lambda x, f: _assigned(x + 1, f),
    "alpha": lambda x, f: torch.add(x, x.flip(1), alpha=f).sub(x.cos(), alpha=f),
    "alpha in place": lambda x, f: (x + 1).add_(x.flip(1), alpha=f),
    "value": lambda x, f: torch.addcmul(x, x.flip(1), x.cos(), value=f).addcdiv_(x, x + 3, value=f),
    "an average": lambda x, f: x.mul(f).add(x.cos(), alpha=1 - f),
    "a power": lambda x, f: (x + 1) ** f + torch.pow(x.abs(), exponent=0.5 * f),
    "an exponential": lambda x, f: abs(f) ** x,
    "a square": lambda x, f: torch.exp(-(x**2) / (2 * f**2)),
    "elu": lambda x, f: nn.functional.elu(x, f) + nn.functional.elu(x, alpha=f),
    "softplus": lambda x, f: nn.functional.softplus(x, f, threshold=1),
    "normalize": lambda x, f: nn.functional.normalize(x, dim=1, eps=f),
    "attention": lambda x, f: nn.functional.scaled_dot_product_attention(x, x, x, scale=f),
    "weight": lambda x, f: torch.lerp(x, x.flip(1), f) + x.lerp(x.cos(), weight=f),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_one_program_serves_all_factors(name: str, inference: None) -> None:
    function = WEIGHTED[name]
    fast: Any = decorate(function, strict=True)
    for value in (0.1, 1 / 3, -0.75, 1.5, math.inf, math.nan):
        torch.testing.assert_close(fast(X, value), function(X, value), equal_nan=True)
    assert fast.cache_info().builds == 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
def test_the_result_has_the_dtype_and_the_bits_of_eager(
    dtype: torch.dtype, inference: None
) -> None:
    def function(x: torch.Tensor, f: float, g: float) -> tuple[torch.Tensor, ...]:
        return x * f, g - x, x[0, 0] / f, x[0, 1] + g, x < f, x != g

    fast: Any = decorate(function, strict=True)
    x = (X * 100).abs().to(dtype)
    for f, g in itertools.product(VALUES[:4], VALUES[2:]):
        for ours, eager in zip(fast(x, f, g), function(x, f, g), strict=True):
            assert same(ours, eager), (f, g)
    assert fast.cache_info().builds == 1


def test_floats_beyond_float32_are_part_of_the_key(inference: None) -> None:
    fast: Any = decorate(lambda x, f: x * f, strict=True)
    for value in (0.5, 1e39, 1e300):
        assert same(fast(X, value), X * value)
    assert fast.cache_info().entries == 3


CONTROL: dict[str, Callable[[Any, float], Any]] = {
    "branch": lambda x, f: x * 2 if f > 0.15 else x + 1,
    "truth": lambda x, f: x * 2 if f else x + 1,
    "equality": lambda x, f: x * 2 if f == 0.1 else x + 1,
    "membership": lambda x, f: x * 2 if f in (0.1, 0.3) else x + 1,
    "shape": lambda x, f: x.repeat(int(f * 10), 1) + 1,
    "power": lambda x, f: x * f**3,
    "rounding": lambda x, f: x + round(f),
    "text": lambda x, f: x * len(f"{f}"),
    "an operator's attribute": nn.functional.celu,
    "a comparison of numbers": lambda x, f: x * (f < 0.15),
    "a computed limit": lambda x, f: x.clamp(min=f * 3),
    "a limit of halves": lambda x, f: x.half().clamp(min=f),
    "an int tensor": lambda x, f: x + torch.tensor(f, dtype=torch.int64),
    "math": lambda x, f: x * math.exp(f),
    "product and sum of numbers": lambda x, f: x * (f * 3 + 1),
    "product added in float64": lambda x, f: (x.double() + f * 3).float(),
    "quotient of a number": lambda x, f: x * (1 / f),
    "result": lambda x, f: (x * 2, f)[0] + f // 1,
    "swallowed": lambda x, f: x * _safely(f),
}


def _safely(value: float) -> int:
    try:
        return int(value * 10)
    except Exception:
        return 100


@pytest.mark.parametrize("name", CONTROL)
def test_other_uses_make_the_value_part_of_the_key(name: str, inference: None) -> None:
    function = CONTROL[name]
    fast: Any = decorate(function, strict=True)
    for value in (0.1, 0.2, 0.3):
        torch.testing.assert_close(fast(X, value), function(X, value))
    assert fast.cache_info().entries == 3


def test_floats_in_containers_and_keywords(inference: None) -> None:
    def function(x: torch.Tensor, pair: Any, *, more: Any) -> torch.Tensor:
        return (x * pair[0] + more["b"]) * pair[1]

    fast: Any = decorate(function, strict=True)
    for a, b in ((0.5, 1.5), (2.5, -1.0)):
        for n in (1, 2):
            args, kwargs = (X, (a, n)), {"more": {"b": b}}
            torch.testing.assert_close(fast(*args, **kwargs), function(*args, **kwargs))
    assert (fast.cache_info().entries, fast.cache_info().builds) == (1, 1)


def test_returned_float(inference: None) -> None:
    fast: Any = decorate(lambda x, f: (x * f, f, [f + 1]), strict=True)
    for value in (0.5, 1.5):
        result, same_value, (other,) = fast(X, value)
        assert torch.equal(result, X * value)
        assert (type(same_value), same_value, other) == (float, value, value + 1)


def test_a_scripted_module_with_a_default(inference: None) -> None:
    fast: Any = decorate(Scaled().eval(), strict=True)
    assert torch.equal(fast(X), X * 2)
    for value in VALUES[:3]:
        assert torch.equal(fast(X, value), X * value)
        assert torch.equal(fast(X, scale=value), X * value)
    assert fast.cache_info().entries == 3
    assert torch.equal(fast(X, 3), X * 3)  # an int is another key, in eager another dtype too
    assert fast.cache_info().entries == 4


INTS = [10, 11, 0, -3, 2**31 - 1, -(2**31) + 1]
INT_ARITHMETIC: dict[str, Callable[[Any, int], Any]] = {
    "x * t": lambda x, t: x * t,
    "t - x": lambda x, t: t - x,
    "x + (2 * t - 1)": lambda x, t: x + (2 * t - 1),
    "x * (t / 1000)": lambda x, t: x * (t / 1000),
    "x / (t + 0.5)": lambda x, t: x / (t + 0.5),
    "t / x": lambda x, t: t / (x.abs() + 1),
    "x / -t": lambda x, t: x / -t,
    "x % t": lambda x, t: (x % t + x // t) * abs(t),
    "a step": lambda x, t: x * torch.tensor([t], dtype=torch.int64),
    "a full tensor": lambda x, t: x * torch.full((4,), t, dtype=torch.float32),
}


@pytest.mark.parametrize("name", INT_ARITHMETIC)
def test_one_program_serves_all_ints(name: str, inference: None) -> None:
    function = INT_ARITHMETIC[name]
    fast: Any = decorate(function, strict=True)
    for value in INTS:
        assert same(fast(X, value), function(X, value)), value
    info = fast.cache_info()
    assert (info.builds, info.entries, info.misses) == (1, 1, 1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_an_int_leaves_the_dtype_to_the_tensor(dtype: torch.dtype, inference: None) -> None:
    def function(x: torch.Tensor, t: int) -> tuple[torch.Tensor, ...]:
        return x * t, t + x, x[0] * (3 * t), x.long() >= t, x.long().clamp(t, 4)

    fast: Any = decorate(function, strict=True)
    x = (X * 100).to(dtype)
    for value in INTS:
        for ours, eager in zip(fast(x, value), function(x, value), strict=True):
            assert same(ours, eager), value
    assert fast.cache_info().builds == 1


INT_CONTROL: dict[str, Callable[[Any, int], Any]] = {
    "branch": lambda x, t: x * 2 if t > 1 else x + 1,
    "loop": lambda x, t: sum((x * i for i in range(t)), x),
    "axis": lambda x, t: x.cumsum(t % 2) + 1,
    "index": lambda x, t: x[t] * 2,
    "slice": lambda x, t: x[:t] * 2,
    "size": lambda x, t: x.repeat(t, 1) + 1,
    "power": lambda x, t: x**t,
    "floor": lambda x, t: x * (t // 2),
    "a small type": lambda x, t: x.to(torch.int8) * t,
    "large products": lambda x, t: x * (t * 2**40 * 2**20),
    "result": lambda x, t: (x * 2, t + 1),
    "a layer's attribute": lambda x, t: nn.functional.pad(x, (t, 0)),
}


@pytest.mark.parametrize("name", INT_CONTROL)
def test_other_uses_make_an_int_part_of_the_key(name: str, inference: None) -> None:
    function = INT_CONTROL[name]
    fast: Any = decorate(function, strict=True)
    for value in (1, 2):
        torch.testing.assert_close(fast(X, value), function(X, value))
    assert fast.cache_info().entries == 2


def test_numbers_are_specialized_independently(inference: None) -> None:
    def function(x: torch.Tensor, dim: int, t: int, scale: float) -> torch.Tensor:
        return x.cumsum(dim) * t + scale

    fast: Any = decorate(function, strict=True)
    for dim, t in ((0, 10), (0, 11), (1, 10), (1, 12)):
        torch.testing.assert_close(fast(X, dim, t, t / 7), function(X, dim, t, t / 7))
    assert (fast.cache_info().builds, fast.cache_info().entries) == (2, 2)


def test_specialization_applies_to_all_shapes(
    inference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast: Any = decorate(lambda x, dim: x.cumsum(dim) + 1, strict=True)
    fast(X, 0)
    monkeypatch.setattr(numbers, "_placeholder", lambda _: pytest.fail("it was tried again"))
    assert torch.equal(fast(X[:2], 1), X[:2].cumsum(1) + 1)


def test_sizes_are_not_number_arguments(inference: None) -> None:
    fast: Any = decorate(lambda x, size: x.reshape(size) + 1, strict=True)
    assert fast(X, torch.Size([4, 3])).shape == (4, 3)
    assert fast(X, torch.Size([2, 6])).shape == (2, 6)


def test_large_ints_are_part_of_the_key(inference: None) -> None:
    fast: Any = decorate(lambda x, t: x * t, strict=True)
    for value in (2**31, 2**62, 7):
        assert torch.equal(fast(X, value), X * value)
    assert fast.cache_info().entries == 3


def test_refresh_shapes_and_modes_apply_with_numbers() -> None:
    fast: Any = decorate(Scaled().eval(), strict=True)
    with torch.no_grad():
        fast(X, 0.5)
        fast.refresh()
        assert torch.equal(fast(X, 0.25), X * 0.25)
        assert torch.equal(fast(X[:2], 0.25), X[:2] * 0.25)
        assert fast.cache_info().entries == 2
        assert "(float32[3, 4] cpu, float)" in str(fast.explain())
    fast.train()
    with pytest.raises(tvmify.TrainingMode):
        fast(X, 0.125)
    fast.eval()
    with torch.no_grad():
        assert torch.equal(fast(X, 0.75), X * 0.75)
    assert fast.cache_info().builds <= 2


def test_a_saved_file_has_the_value_of_the_first_call(tmp_path: Any, inference: None) -> None:
    fast: Any = decorate(Scaled().eval(), strict=True)
    fast(X, 0.5)
    fast(X, 0.75)
    tvmify.save(fast, tmp_path / "scaled.pt")
    loaded = tvmify.load(tmp_path / "scaled.pt")
    assert torch.equal(loaded(X, 0.5), X * 0.5)
    with pytest.warns(UserWarning, match="holds no code for these arguments"):
        assert torch.equal(loaded(X, 0.75), X * 0.75)


def test_isinstance_branch_on_a_float_is_detected(inference: None) -> None:
    """During the recording, ``type(scale)`` is another type."""

    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale if type(scale) is float else x

    fast: Any = decorate(function, strict=True)
    for value in (2.0, 3.0):
        assert torch.equal(fast(X, value), function(X, value))
    assert fast.cache_info().entries == 2


def test_a_program_that_writes_accepts_numbers(inference: None) -> None:
    """The comparison with eager undoes its writes."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor, rate: float) -> torch.Tensor:
            self.mean.mul_(1 - rate).add_(x * rate)
            return self.mean + 1

    fast, eager = decorate(Mean().eval(), strict=True), Mean().eval()
    for value in (0.5, 0.25, 0.5):
        torch.testing.assert_close(fast(X, value), eager(X, value))
        torch.testing.assert_close(fast.mean, eager.mean)
    assert fast.cache_info().entries == 1
