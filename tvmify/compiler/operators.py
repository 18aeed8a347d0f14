"""The operators of an ATen program: their calls and their names."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx


def calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that call an operator."""
    return [node for node in graph.nodes if node.op == "call_function"]


def name(node: fx.Node) -> str:
    """Return the qualified name, ``aten.add.Tensor``."""
    return str(node.target)


def short_name(node: fx.Node) -> str:
    """Return the name that TVM's importer and `CONVERTERS` use, ``add.Tensor``."""
    qualified = name(node)
    if qualified.startswith("aten."):
        return qualified.removeprefix("aten.")
    return getattr(node.target, "__name__", qualified)


def count(graph: fx.Graph) -> dict[str, int]:
    """Count the calls of each operator, taking results out of tuples aside."""
    counts = Counter(name(node) for node in calls(graph) if short_name(node) != "getitem")
    return dict(sorted(counts.items()))


#: These carry the tag for their dropout; their converters refuse that by themselves.
_DROPPING_OUT = (
    torch.ops.aten.gru.input,
    torch.ops.aten.lstm.input,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and node.target not in _DROPPING_OUT
