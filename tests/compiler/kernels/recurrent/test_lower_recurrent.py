"""Recurrent layers, whole and single steps: values, and that time is a loop of one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from tvm import relax

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import Array, random
from tests.compiler.programs import check, compiled
from tvmify.compiler.kernels.recurrent.lower_recurrent import describe

# torch's own modules set attributes of theirs while they are exported.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


@pytest.mark.parametrize(
    ("options", "kind", "hidden"),
    [
        ({"num_layers": 2, "bidirectional": True, "batch_first": True}, nn.LSTM, 64),
        ({"bias": False, "bidirectional": True}, nn.LSTM, 37),
        ({"bias": False, "bidirectional": True}, nn.GRU, 64),
        ({"nonlinearity": "relu", "num_layers": 2, "bidirectional": True}, nn.RNN, 37),
        ({"proj_size": 10, "num_layers": 2, "bidirectional": True}, nn.LSTM, 37),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers(options: dict[str, object], kind: type[nn.Module], hidden: int):
    torch.manual_seed(0)
    check(kind(24, hidden, **options), torch.randn(7, 5, 24))


@pytest.mark.parametrize("kind", KINDS)
def test_given_states_and_one_sequence(kind: type[nn.Module]):
    torch.manual_seed(0)
    first = torch.randn(1, 16)
    check(kind(8, 16), torch.randn(6, 8), (first, -first) if kind is nn.LSTM else first)


@pytest.mark.parametrize(("kind", "batch"), [(nn.LSTMCell, 6), (nn.GRUCell, 1)])
def test_cells(kind: type[nn.Module], batch: int):
    torch.manual_seed(0)
    first = torch.randn(batch, 20)
    check(kind(12, 20), torch.randn(batch, 12), (first, -first) if kind is nn.LSTMCell else first)


def test_large_steps_are_shared_among_threads():
    torch.manual_seed(0)
    check(nn.LSTM(16, 256), torch.randn(3, 2, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_kernels_does_not_grow_with_time(kind: type[nn.Module]):
    few, many = (compiled(kind(8, 16), torch.randn(n, 1, 8)).report["kernels"] for n in (2, 50))
    assert set(few) == set(many)
    assert kind.__name__.lower() in many.values()


@pytest.mark.parametrize(
    ("kind", "hidden", "projected", "reverse", "batch"),
    [
        (nn.LSTM, 32, 0, False, "b"),
        (nn.GRU, 20, 0, True, "b"),
        (nn.LSTM, 32, 0, False, 1),
        (nn.RNN, 20, 0, True, "b"),
        (nn.LSTM, 32, 9, True, "b"),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_any_batch_and_number_of_steps(
    kind: type[nn.Module], hidden: int, projected: int, reverse: bool, batch: str | int
):
    inputs, size = 12, projected or hidden
    first = 2 if kind is nn.LSTM else 1
    gates = GATES[kind]
    shapes = [(gates * hidden, inputs), (gates * hidden, size), *[(gates * hidden,)] * 2]
    shapes += [(projected, hidden)] if projected else []
    weights = [random(*shape, seed=i) / 4 for i, shape in enumerate(shapes)]

    def layer(_: relax.BlockBuilder, x: relax.Expr, *others: relax.Expr) -> relax.Expr:
        return describe(x, others[:first], others[first:], reverse=reverse)

    def reference(x: Array, *others: Array) -> Any:
        options = {"proj_size": projected} if projected else {}
        module = kind(inputs, hidden, **options).double()
        with torch.no_grad():
            for parameter, weight in zip(module.parameters(), others[first:], strict=True):
                parameter.copy_(torch.from_numpy(weight))
            states = tuple(torch.from_numpy(state)[None] for state in others[:first])
            given = torch.from_numpy(x[::-1].copy() if reverse else x)
            results, end = module(given, states if first == 2 else states[0])
        each = results.numpy()
        return (each[::-1] if reverse else each, *(end[1].numpy() if first == 2 else ()))

    widths = [size, hidden][:first]
    given_types: list[Any] = [(("s", batch, inputs), "float32")]
    given_types += [((batch, width), "float32") for width in widths]
    program = symbolic.build(layer, given_types, weights, hint=3 if batch == "b" else 48)
    # The products of all steps, of which a tile takes several rows, and the steps.
    assert program.rules >= {"matmul", kind.__name__.lower()}
    for steps, count in [(2, 31), (7, 2), (8, 9), (9, 8), (15, 1), (16, 17), (97, 3)]:
        count = count if batch == "b" else batch
        given = [random(steps, count, inputs, seed=7)]
        given += [random(count, width, seed=8 + i) for i, width in enumerate(widths)]
        symbolic.check(program, reference, given, weights, tolerance=1e-5)


def test_relu_keeps_nan():
    x = torch.randn(4, 2, 8)
    x[1, 0, 3] = float("nan")
    check(nn.RNN(8, 16, nonlinearity="relu"), x)
