"""Numbers, strings and lists follow Python's rules, not TorchScript's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tvmify import tvmify
from tvmify.capture.scripted.scripting import script

pytestmark = pytest.mark.usefixtures("inference")


class Net(nn.Module):
    """Reads two numbers, branches on values, and scales a region's result by `number`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def number(self, n: int, v: float) -> float:
        return n * v

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        n, v = int(x[0]), float(x[1])
        if bool(x.max() > 100):
            x = x + 1
        scale = self.number(n, v)
        return (torch.tanh(self.linear(x)) * 2 + 1).relu() * scale, scale


class Modulo(Net):
    def number(self, n: int, v: float) -> float:
        return float((-(2**62)) * 2 % n)


class Quotient(Net):
    def number(self, n: int, v: float) -> float:
        return 5 / n


class FlooredQuotient(Net):
    def number(self, n: int, v: float) -> float:
        return float(v // 0.1)


class Large(Net):
    def number(self, n: int, v: float) -> float:
        h = n + 7
        for _ in range(30):
            h = h * 31 + 7
        return float(h % 1000)


class Root(Net):
    def number(self, n: int, v: float) -> float:
        return math.sqrt(v)


@pytest.mark.parametrize("cls", [Modulo, Quotient, FlooredQuotient, Large, Root])
def test_numbers_between_regions_are_pythons(cls: type[Net]) -> None:
    net = cls().eval()
    ours = tvmify(net)
    for n, v in ((1, 1.0), (0, 1.0), (-1, -1.0), (3, -0.0), (2, 0.3)):
        x = torch.tensor([n, v, 0.5, 0.25])
        try:
            expected = net(x)[1]
        except ArithmeticError as error:
            with pytest.raises(type(error), match=str(error)):
                ours(x)
        except ValueError as error:
            with pytest.raises(type(error), match=str(error)):
                ours(x)
        else:
            found = ours(x)
            assert found[1] == expected
            torch.testing.assert_close(found[0], net(x)[0], rtol=1e-5, atol=1e-5)
    assert "control flow runs in Python" in str(ours.explain())
    assert ours.cache_info().entries > 0


class Layers(nn.Module):
    """Has a loop that is unrolled, since indices of modules have to stay constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) * (7 // (i + 1))
        return x


def test_indices_of_modules_stay_constants() -> None:
    graph = str(script(Layers().eval()).graph)  # type: ignore[union-attr]
    assert [f"value={7 // (i + 1)}]" in graph for i in range(3)] == [True] * 3


def _of_constants(x: Tensor) -> Tensor:
    h = 9223372036854775807
    h = h + 1
    return x * float(h % 1000)


def _divides_by_zero(x: Tensor) -> Tensor:
    zero = 0
    return x * (5 % zero)


def _remainder_in_place(x: Tensor) -> Tensor:
    x = x * 2
    x %= 3
    return x


def _whole_power(x: Tensor) -> Tensor:
    return torch.arange(4) * (x.shape[0] ** 2)


def _told_apart(x: Tensor, flag: bool) -> Tensor:
    return x * 2 if isinstance(flag, int) else x * 3


@pytest.mark.parametrize("function", [_of_constants, _remainder_in_place, _whole_power])
def test_numbers_of_one_program_are_pythons(function: Any) -> None:
    ours, x = tvmify(function, strict=True), torch.tensor([-1.0, 2.5, -4.0, 0.0])
    assert torch.equal(ours(x), function(x))
    assert ours(x).dtype == function(x).dtype


def test_a_bool_is_an_int() -> None:
    x = torch.ones(4)
    assert torch.equal(tvmify(_told_apart)(x, True), _told_apart(x, True))


@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_a_division_of_constants_by_zero_raises_and_ends_no_process() -> None:
    with pytest.raises(ZeroDivisionError):
        tvmify(_divides_by_zero)(torch.ones(4))


@torch.jit.script
def _wraps(x: Tensor, n: int) -> Tensor:
    return x * float((n * 4611686018427387904 * 3) % 1000)


@torch.jit.script
def _floors(x: Tensor, v: float) -> Tensor:
    return x * (v // 0.1)


def test_numbers_of_torchscript_are_torchscripts() -> None:
    x = torch.ones(4)
    for function, argument in ((_wraps, 3), (_floors, 1.0)):
        assert torch.equal(tvmify(function)(x, argument), function(x, argument))


# ------------------------------------------------------------------------------ tensors of integers


_DIVISIONS = {
    "x // -1": lambda x: x // -1,
    "x % -1": lambda x: x % -1,
    "fmod": lambda x: torch.fmod(x, -1),
    "floor": lambda x: torch.div(x, -1, rounding_mode="floor"),
    "constants": lambda x: x % torch.tensor([-1, 5, -1]),
    "5 // x": lambda x: 5 // x,
    "-5 % x": lambda x: -5 % x,
}


@pytest.mark.parametrize("name", _DIVISIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_divisions_of_the_least_integer_wrap(name: str, dtype: torch.dtype) -> None:
    function = _DIVISIONS[name]
    x = torch.tensor([torch.iinfo(dtype).min, 7, -1], dtype=dtype)
    found, expected = tvmify(function, strict=True)(x), function(x)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("divide", [torch.remainder, torch.floor_divide, torch.fmod])
def test_divisions_of_integers_by_zero_raise(divide: Any) -> None:
    x, y = torch.tensor([1, 2]), torch.tensor([1, 0])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        tvmify(divide, strict=True)(x, y)


def _logarithm(x: Tensor) -> Any:
    return torch.exp(x), math.log(x[0, 0])


def _rows(x: Tensor) -> Any:
    return torch.exp(x) * 2, sum(x)


def _larger(x: Tensor) -> Any:
    return torch.exp(x), max(x[0, 0], x[0, 1])


def _larger_elements(x: Tensor) -> Any:
    return torch.exp(x) * max(x, x + 1)


@pytest.mark.filterwarnings("ignore:.* runs in eager PyTorch")
@pytest.mark.parametrize("function", [_logarithm, _rows, _larger, _larger_elements])
def test_functions_of_python_that_are_given_tensors(function: Any) -> None:
    def outcome(function: Any, first: float) -> Any:
        x = torch.tensor([[first, math.nan], [3.0, 1.0]])
        try:
            return function(x)
        except (RuntimeError, ValueError) as error:
            return type(error)

    compiled = tvmify(function, cache=False, compare=False)
    for first in (0.5, -0.5):
        got, expected = outcome(compiled, first), outcome(function, first)
        assert str(got) == str(expected)


class Views(nn.Module):
    """Views as other dtypes; the number that stands for float32 is also a size."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.int32

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x.view(torch.int32) + 1, x.view(self.dtype) * 2, x.view(y.dtype) - y


@pytest.mark.filterwarnings("ignore:.* runs in eager PyTorch")
def test_views_of_another_dtype_are_not_of_another_shape() -> None:
    args = torch.randn(3), torch.arange(3, dtype=torch.int32)
    found = tvmify(Views().eval(), cache=False, compare=False)(*args)
    assert all(map(torch.equal, found, Views()(*args)))
