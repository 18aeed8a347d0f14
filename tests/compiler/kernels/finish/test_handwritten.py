"""Kernels written as loops, with their epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import tirx

from tests.compiler.programs import check, scheduled
from tvmify.compiler.kernels.common.rewriting import names_of
from tvmify.compiler.kernels.finish.handwritten import STORES_TWICE

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")


def attention(finish: Callable[..., Any]) -> Callable[..., Any]:
    """Attention with four heads, positions before heads, and an epilogue."""

    def program(*given: torch.Tensor) -> Any:
        query, key, value, *others = given
        result = F.scaled_dot_product_attention(query, key, value)
        return finish(result.transpose(1, 2), *others)

    return program


def operands(queries: int, *others: tuple[int, ...]) -> list[torch.Tensor]:
    shapes = [(1, 4, queries, 16), (1, 4, 50, 16), (1, 4, 50, 16), *others]
    return [torch.randn(shape) for shape in shapes]


class Followed(nn.Module):
    """A recurrent layer, with operators on its states, last state and last cell."""

    def __init__(self, kind: type[nn.RNNBase], finish: Callable[..., Any], hidden: int = 32):
        super().__init__()
        self.layer, self.finish = kind(20, hidden), finish

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        return self.finish(*self.layer(x), other)


def as_they_are(states: torch.Tensor, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return states


def of_the_cell(states: torch.Tensor, ends: tuple[torch.Tensor, ...], other: torch.Tensor) -> Any:
    return ends[1].tanh()


def activated(states: torch.Tensor, last: Any, other: torch.Tensor) -> torch.Tensor:
    return gated(states.tanh(), other)


def gated(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return y * torch.sigmoid(gate)


@pytest.mark.parametrize(
    ("program", "arguments", "rule"),
    [
        pytest.param(attention(gated), operands(50, (1, 50, 4, 16)), "attention", id="tiles"),
        pytest.param(attention(gated), operands(2, (1, 2, 4, 16)), "attention", id="rows"),
        pytest.param(attention(lambda y: F.gelu(y) + y), operands(50), "attention", id="twice"),
        pytest.param(
            lambda m: m.cumsum(0) * m + 1,
            [torch.ones(3, 40, dtype=torch.int64)],
            "cumsum",
            id="sum",
        ),
        pytest.param(
            lambda x: torch.tanh(x.cumprod(1)) * x, [torch.randn(3, 9, 70)], "cumprod", id="product"
        ),
        pytest.param(
            Followed(nn.GRU, activated),
            [torch.randn(7, 5, 20), torch.randn(7, 5, 32)],
            "gru",
            id="gru",
        ),
        pytest.param(
            Followed(nn.LSTM, activated),
            [torch.randn(7, 5, 20), torch.randn(7, 5, 32)],
            "lstm",
            id="lstm",
        ),
    ],
)
def test_epilogue_is_fused_into_the_store(
    program: Callable[..., Any], arguments: list[torch.Tensor], rule: str
):
    check(program, *arguments)
    ir_mod, rules = scheduled(program, *arguments)
    assert any(own == rule and name.startswith("fused_") for name, own in rules.items())
    assert {rule} in [
        names_of(function.body.block.body)
        for _, function in ir_mod.functions_items()
        if isinstance(function, tirx.PrimFunc)
    ]


def gate_first(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def program(gate: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(gate)
        return kernel(*given) * gate

    return program


class Gated(nn.Module):
    """A GRU and a gate that is computed before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(20, 32)

    def forward(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(gate)
        return self.layer(x)[0] * gate


@pytest.mark.parametrize(
    ("program", "arguments", "rule"),
    [
        pytest.param(
            gate_first(attention(lambda y: y)),
            [torch.randn(1, 50, 4, 16), *operands(50)],
            "attention",
            id="attention",
        ),
        pytest.param(
            gate_first(lambda x: x.cumsum(0)),
            [torch.randn(9, 70), torch.randn(9, 70)],
            "cumsum",
            id="sum",
        ),
        pytest.param(Gated(), [torch.randn(7, 5, 32), torch.randn(7, 5, 20)], "gru", id="gru"),
    ],
)
def test_epilogue_may_read_earlier_values(
    program: Callable[..., Any], arguments: list[torch.Tensor], rule: str
):
    artifact = check(program, *arguments)
    assert rule in artifact.report["kernels"].values()


def test_contiguous_running_sums_are_not_fused():
    artifact = check(lambda x: torch.tanh(x.cumsum(1)), torch.randn(9, 70))
    assert sorted(artifact.report["kernels"].values()) == ["cumsum", "elementwise"]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(
            attention(lambda y, z: (y * z, y)), operands(50, (1, 50, 4, 16)), id="two results"
        ),
        pytest.param(attention(lambda y, z: y + z), operands(50, (3, 50, 4, 16)), id="broadcast"),
        pytest.param(attention(lambda y, z: y.flatten(2) + z), operands(50, (50, 64)), id="shape"),
        pytest.param(
            Followed(nn.LSTM, of_the_cell),
            [torch.randn(7, 5, 20), torch.randn(7, 5, 32)],
            id="the cell that an LSTM reads",
        ),
        pytest.param(
            Followed(nn.GRU, activated, hidden=30),
            [torch.randn(7, 5, 20), torch.randn(7, 5, 30)],
            id="padded states",
        ),
    ],
)
def test_unfusable_epilogue_is_a_separate_kernel(
    program: Callable[..., Any], arguments: list[torch.Tensor]
):
    check(program, *arguments)


def test_double_store_is_marked_with_and_without_epilogue():
    for finish in (activated, as_they_are):
        program = Followed(nn.GRU, finish)
        ir_mod, rules = scheduled(program, torch.randn(7, 5, 20), torch.randn(7, 5, 32))
        (name,) = (name for name, rule in rules.items() if rule == "gru")
        assert STORES_TWICE in ir_mod[f"tvmify_{name}"].attrs
