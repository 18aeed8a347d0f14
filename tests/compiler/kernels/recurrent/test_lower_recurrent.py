"""LSTM and GRU, whole and single steps: values, and that time is a loop of one kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compiler.programs import check, compiled

# torch's own modules set attributes of theirs while they are exported.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")

KINDS = [nn.LSTM, nn.GRU]


@pytest.mark.parametrize(
    ("options", "kind", "hidden"),
    [
        ({"num_layers": 2, "bidirectional": True, "batch_first": True}, nn.LSTM, 64),
        ({"bias": False, "bidirectional": True}, nn.LSTM, 37),
        ({"bias": False, "bidirectional": True}, nn.GRU, 64),
    ],
)
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
