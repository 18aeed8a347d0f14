"""Numbers that a graph of ``torch.compile`` computes from numbers: Python does that instead.

Dynamo records arithmetic of Python's integers and floats as it does that of tensors. A program
takes numbers as arguments, but it does not have all of Python's arithmetic, and returns tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
#: Takes the arguments of a call, and returns the numbers that follow them.
Compute = Callable[[Sequence[Any]], tuple[Any, ...]]


def take_out(
    graph: fx.Graph, places: Sequence[fx.Node], numbers: Collection[int], sizes: Collection[int]
) -> tuple[list[fx.Node], Compute]:
    """Make arguments of the numbers that a graph computes from numbers.

    They are the numbers among the results, and those that tensors are computed with. Where sizes
    play a part, the graph computes the latter itself: they may be sizes again.

    Parameters
    ----------
    graph
        A graph of Dynamo or AOTAutograd, which is changed.
    places
        Its placeholders.
    numbers, sizes
        Which placeholders are numbers, and which of these are sizes of tensors.

    Returns
    -------
    list of fx.Node
        The new placeholders, which follow the others.
    Compute
        Returns their values.
    """
    computable = {places[i]: None for i in numbers}
    without_sizes = {places[i]: None for i in numbers if i not in sizes}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs or not isinstance(_example(node), _NUMBERS):
            continue
        for kind in (computable, without_sizes):
            if all(value in kind for value in inputs):
                kind[node] = None
    output = graph.output_node()
    taken: dict[fx.Node, fx.Node] = {}
    for node in computable:
        users = [
            user
            for user in node.users
            if user is output or (node in without_sizes and user not in without_sizes)
        ]
        if node.op == "placeholder" or not users:
            continue
        with graph.inserting_after([*places, *taken.values()][-1]):
            taken[node] = graph.placeholder(node.name)
        taken[node].meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, taken[node])
    compute = _function_of(computable, [places[i] for i in numbers], taken)
    for node in reversed(computable):
        if node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    return list(taken.values()), lambda args: compute(*(args[i] for i in numbers))


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _function_of(
    computable: Collection[fx.Node], inputs: Sequence[fx.Node], outputs: Collection[fx.Node]
) -> Callable[..., tuple[Any, ...]]:
    program = fx.Graph()
    copies = {node: program.placeholder(node.name) for node in inputs}
    for node in computable:
        if node not in copies:
            copies[node] = program.node_copy(node, copies.__getitem__)
    program.output(tuple(copies[node] for node in outputs))
    program.eliminate_dead_code()
    return fx.GraphModule({}, program).forward
