"""Compilation of graphs from Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tvmify.integrations.dynamo_graph import DynamoGraph, Origin


def recorded(model: Callable[..., Any], *calls: tuple[Any, ...]) -> tuple[DynamoGraph, Any]:
    """Return the graph that Dynamo records at the last call, and the arguments it passes."""
    found: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graph = DynamoGraph.of(module, inputs, Origin.of(module, inputs), weights_are_state=True)

        def run(*args: Any) -> Any:
            found[:] = [graph, args]
            return module.forward(*args)

        return run

    with torch.no_grad():
        fast = torch.compile(model, backend=backend)
        for call in calls:
            fast(*call)
    return found[0], found[1]


def test_weights_are_attributes_and_inputs_arguments() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    graph, args = recorded(net, (torch.randn(2, 4),))
    weights = {id(x) for x in (*net.parameters(), *net.buffers())} - {
        id(net[1].num_batches_tracked)
    }
    assert {id(x) for x in graph.pick_weights(args)} == weights
    (x,) = graph.pick_inputs(args)
    assert x.shape == (2, 4)
    module = graph.module(graph.pick_weights(args))
    with torch.no_grad():
        torch.testing.assert_close(module(x)[0], net(x))
    assert graph.symbols == {}


def test_sizes_are_read_from_tensors_and_have_one_name_where_they_are_equal() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.cat([x, y], 1) * x.shape[0], y.shape[1]

    calls = [(torch.randn(n, 2), torch.randn(n, m)) for n, m in ((3, 5), (4, 6))]
    graph, args = recorded(joined, *calls)
    assert graph.symbols == {0: ("s0", None), 1: ("s0", "s1")}
    inputs = graph.pick_inputs(args)
    assert all(isinstance(x, torch.Tensor) for x in inputs)
    (result,) = graph.module(())(*inputs)
    torch.testing.assert_close(result, joined(*calls[1])[0])
    assert graph.results is not None
    first, second = graph.results
    assert (first, args[~second]) == (0, 6)


def test_floats_and_integers_are_arguments() -> None:
    def scaled(x: torch.Tensor, times: int, by: float) -> torch.Tensor:
        return x * times + by

    x = torch.randn(3, 2)
    graph, args = recorded(scaled, (x, 2, 0.5), (x, 3, 0.75))
    inputs = graph.pick_inputs(graph.with_numbers(args))
    assert sorted(type(value).__name__ for value in inputs) == ["Tensor", "float", "int"]
    torch.testing.assert_close(graph.module(())(*inputs)[0], scaled(x, 3, 0.75))


def test_a_label_names_the_code() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    graph, _ = recorded(doubled, (torch.randn(2),))
    assert graph.origin.label.startswith("graph ")
    assert "(doubled, test_dynamo_graph.py:" in graph.origin.label
