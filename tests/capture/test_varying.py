"""Sizes that are symbols in recorded programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import tvmify
from tvmify.capture import Limits, Varying, capture
from tvmify.signature import Signature
from tvmify.torch_compat.symbols import identities_of


class Pair(nn.Module):
    """Can be scripted; takes two tensors with unrelated sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, y * 2


class Unscripted(Pair):
    """Has to be recorded, since TorchScript refuses star arguments."""

    def forward(self, *tensors: Any, **more: Any) -> Any:
        return super().forward(*tensors, *more.values())


class Parity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.size(1) % 2 == 1 else x - 1


def shapes(module: nn.Module, args: Any, kwargs: Any, varying: Varying) -> list[tuple[Any, ...]]:
    """Return the shapes of the exported program's inputs."""
    program = capture(module.eval(), args, kwargs, varying).export(args, kwargs, varying)
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    return [identities_of(value.shape) for value in values]


@pytest.mark.parametrize("module", [Pair(), Unscripted()], ids=["scripted", "exported"])
def test_sizes_of_one_name_are_one_symbol(module: nn.Module) -> None:
    x, y = torch.zeros(2, 7, 4), torch.zeros(7, 2)
    (b, s, d), (first, second) = shapes(
        module, (x, y), {}, Varying({0: ("b", "s", None), 1: ("s", "b")})
    )
    assert d == 4
    assert (first, second) == (s, b)
    assert not isinstance(b, int)
    assert b != s


def test_sizes_of_other_names_stay_apart_though_equal_in_the_call() -> None:
    x, y = torch.zeros(5), torch.zeros(5)
    (a,), (b,) = shapes(Pair(), (x, y), {}, Varying({0: ("a",), 1: ("b",)}))
    assert a != b


def test_keywords_are_found_whatever_their_order() -> None:
    kwargs = {"y": torch.zeros(3, 5), "x": torch.zeros(5)}
    found = shapes(Pair(), (), kwargs, Varying({0: (None, "s"), 1: ("s",)}))
    assert sorted(map(len, found)) == [1, 2]
    assert len({size for shape in found for size in shape if not isinstance(size, int)}) == 1


def test_a_branch_on_a_size_is_a_guard() -> None:
    x, varying = torch.zeros(2, 7), Varying({0: (None, "s")})
    program = capture(Parity(), (x,), {}, varying).export((x,), {}, varying)
    (value,) = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    env = value.shape[1].node.shape_env
    assert any("Mod" in str(guard.expr) for guard in env.guards)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, **_: x * len(str(x.shape)),
        lambda x, **_: {f"{x.shape[0]:>4d} {x.shape[0] / 2:.1f} {x.shape[0] > 6}": x * 2},
        lambda x, **_: x * 2 if isinstance(x.shape[0], int) else x * 3,
        lambda x, **_: x * 2 if isinstance(x.shape[0] / 2, float) else x * 3,
    ],
)
@torch.no_grad()
def test_sizes_are_numbers_to_forward(function: Callable[..., Any]) -> None:
    fast = tvmify(function, cache=False)
    for size in (3, 5, 12):
        x = torch.randn(size, 4)
        torch.testing.assert_close(fast(x), function(x), rtol=0, atol=0)


@torch.no_grad()
def test_programs_that_differ_in_their_assumptions_are_distinguished() -> None:
    """An assertion about a size is not an operator, but part of the program."""

    def limited(x: torch.Tensor, **_: Any) -> torch.Tensor:
        assert x.shape[0] < 6, f"got {x.shape}"
        return x * 2

    unlimited, fast = tvmify(lambda x, **_: x * 2), tvmify(limited)
    for size in (3, 5):
        unlimited(torch.zeros(size, 4))
        fast(torch.zeros(size, 4))
    with pytest.raises(AssertionError, match=r"got torch.Size\(\[12, 4\]\)"):
        fast(torch.zeros(12, 4))


def test_limits_bound_a_symbol() -> None:
    x, y = torch.zeros(5), torch.zeros(5)
    varying = Varying({0: ("a",)}, {"a": Limits(3, 64)})
    program = capture(Pair(), (x, y), {}, varying).export((x, y), {}, varying)
    (bound,) = program.range_constraints.values()
    assert (bound.lower, bound.upper) == (3, 64)


def test_key_texts_name_symbols_and_limits() -> None:
    varying = Varying({1: ("s0", None)}, {"s0": Limits(2, 64)})
    signature = Signature.of((torch.zeros(3, 4), torch.zeros(3, 4)), {})
    static, symbolic = signature.with_symbols(varying.axes).leaves
    assert str(static) == "float32[3, 4] cpu"
    assert str(symbolic) == "float32[s0, 4] cpu"
    assert varying.key_text() == "2 <= s0 <= 64, variant 0"
