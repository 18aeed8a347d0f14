"""Recurrent layers are recorded by their shapes; everything else uses torch's rule."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from tvmify.torch_compat.recurrent_shapes import recurrent_shapes

OPTIONS = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in itertools.product((1, 2), *[(False, True)] * 3)
]
PROJECTED = {"proj_size": 4, "num_layers": 2, "bidirectional": True}


def _described(results: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in tree_leaves(results)]


def _of_fakes(layer: nn.Module, *shape: int) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return _described(layer(torch.empty(shape)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, own) for kind in (nn.LSTM, nn.GRU) for own in OPTIONS), (nn.LSTM, PROJECTED)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_shapes_and_strides_match_torch(kind: Any, options: dict[str, Any]):
    layer = kind(6, 8, **options).eval()
    usual = _of_fakes(layer, 5, 3, 6)
    with recurrent_shapes():
        assert _of_fakes(layer, 5, 3, 6) == usual
    assert usual == _described(layer(torch.randn(5, 3, 6)))


def test_wrong_shapes_are_left_to_torch():
    with recurrent_shapes(), pytest.raises(RuntimeError):
        _of_fakes(nn.LSTM(6, 8).eval(), 5, 3, 7)


def test_real_tensors_are_computed():
    layer, x = nn.LSTM(6, 8).eval(), torch.randn(5, 3, 6)
    with torch.no_grad():
        expected = layer(x)[0]
        with recurrent_shapes():
            assert torch.equal(layer(x)[0], expected)
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert layer(torch.empty(5, 3, 6))[0].shape == expected.shape


def test_other_threads_still_decompose_layers():
    layer = nn.GRU(6, 8).eval()
    found: list[int] = []

    def trace() -> None:
        graph = make_fx(
            lambda x: layer(x)[0],
            decomposition_table=dict(decomposition_table),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(torch.randn(5, 3, 6))
        found.append(len(graph.graph.nodes))

    with recurrent_shapes():
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
    assert found[0] > 5 * 4  # five operators for each of the steps
