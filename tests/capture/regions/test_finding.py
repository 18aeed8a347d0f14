"""The parts of a graph that become regions. Nothing is compiled here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tvmify.capture import Driver, drive
from tvmify.errors import CaptureError, UnsupportedOperator


def _never(*_: Any) -> list[Tensor]:
    raise AssertionError("nothing runs here")


def driver(callable_: Any) -> Driver:
    return drive(callable_, itertools.count(1).__next__, _never)


def regions(callable_: Any) -> list[str]:
    parts = driver(callable_).parts.values()
    return [" ".join(sorted(part.operators.elements())) for part in parts]


def _nested(x: Tensor, count: int) -> Tensor:
    for i in range(count):
        if bool(x.sum() > 0):
            x = x.exp().sin().cos()
        while bool(x.sum() < 0):
            x = x.tanh().cos().sin() * float(i)
    return x


def test_blocks_in_blocks_have_regions() -> None:
    assert regions(_nested) == ["cos exp sin", "cos sin tanh"]


def _numbers(x: Tensor, factor: float, flag: bool) -> Tensor:
    y = (x.exp() * factor).sin().view(x.size(0), -1)
    if flag:
        y = y.cos()
    n = int(y.sum())
    return (y.exp() * n).sin().cos().tanh()


def test_arguments_may_enter_as_numbers_but_no_number_that_a_tensor_gives() -> None:
    found = driver(_numbers).parts
    assert [sorted(part.operators.elements()) for part in found.values()] == [
        ["cos", "exp", "mul", "sin", "sum"],
        ["cos", "sin", "tanh"],
    ]
    first, second = found.values()
    assert len(first.booleans) == 1
    assert first.program.fingerprint != second.program.fingerprint


def _random(x: Tensor) -> Tensor:
    x = x.exp().sin().cos()
    return (x + torch.rand_like(x)).exp().sin().cos()


def _constants(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return torch.arange(4).exp().sin().cos()
    return x.exp().sin().cos()


def _shapes_by_values(x: Tensor) -> Tensor:
    kept = x.exp().sin().cos().nonzero()
    return kept.float().exp().sin().cos()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_random, ["cos exp sin", "add cos exp sin"]),
        (_constants, ["cos exp sin"]),
        (_shapes_by_values, ["cos exp sin", "cos exp sin"]),
    ],
)
def test_statements_ending_a_region(function: Any, expected: list[str]) -> None:
    assert regions(function) == expected


def _too_short(x: Tensor) -> Tensor:
    return x.exp() if bool(x.sum() > 0) else x.sin()


def test_no_region_means_no_driver() -> None:
    with pytest.raises(CaptureError, match="long enough"):
        driver(_too_short)


class Keeps(nn.Module):
    """Two methods set attributes; forward does not set one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = torch.zeros(4)
        self.bias = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x + self.last).sin().cos() + self.bias
        return self.last

    @torch.jit.export
    def set_bias(self, bias: Tensor) -> None:
        self.bias = bias


def test_attributes_that_any_method_sets_are_inputs_and_parameters_are_weights() -> None:
    (part,) = driver(torch.jit.script(Keeps())).parts.values()
    assert part.program.weights == ("linear.weight", "linear.bias")
    schema: Any = part.program.scripted.schema
    assert len(schema.arguments) == 1 + 3  # self, x, last, bias


def test_a_plain_module_with_effects_is_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="changes attributes"):
        driver(Keeps())


def _writes_to_argument(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return x.exp().sin().cos().tanh()


def _writes_to_its_own(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(4)
    for i in range(x.size(0)):
        z[i] = 1.0
    return (x.exp() + y).sin().cos() + z


def test_effects_are_seen_only_where_they_outlive_the_call() -> None:
    assert driver(torch.jit.script(_writes_to_argument)).has_effects
    assert not driver(torch.jit.script(_writes_to_its_own)).has_effects
