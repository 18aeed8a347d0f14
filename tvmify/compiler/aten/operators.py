"""The operators of an ATen program: their calls and their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

#: PyTorch's call of a custom operator that writes to its arguments, made functional.
FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
#: PyTorch's call of an operator that draws from a given state of the random generator, and leaves
#: the generator as it was: what a checkpoint computes again.
REPLAYED = torch.ops.higher_order.run_with_rng_state
#: Key of an attention node's meta: the result of a query that sees no key.
EMPTY = "tvmify.empty"
#: Key of an attention node's meta: the value that replaces scores that a bool mask hides.
FILL = "tvmify.fill"


def calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that call an operator."""
    return [node for node in graph.nodes if node.op == "call_function"]


def operator(node: fx.Node) -> Any:
    """Return the operator that a node calls, also if PyTorch has wrapped it."""
    if node.target is FUNCTIONALIZED:
        return node.args[0]
    return node.args[1] if node.target is REPLAYED else node.target


def name(node: fx.Node) -> str:
    """Return the qualified name, ``aten.add.Tensor``."""
    return str(operator(node))


def short_name(node: fx.Node) -> str:
    """Return the name that TVM's importer and `CONVERTERS` use, ``add.Tensor``; operators that are
    not PyTorch's own keep their namespace.
    """
    called = operator(node)
    if isinstance(called, torch._ops.OpOverload):
        return str(called).removeprefix("aten.")
    return getattr(node.target, "__name__", str(called))


def base_name(node: fx.Node) -> str:
    """Return the short name without overload, ``add``."""
    return short_name(node).rpartition(".")[0]


def schema(node: fx.Node) -> torch.FunctionSchema:
    """Return the schema of the operator, which is one of PyTorch's."""
    called = operator(node)
    assert isinstance(called, torch._ops.OpOverload)
    return called._schema


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by the names of the schema, with defaults."""
    defaults, positional = _parameters(operator(node))
    if node.target is FUNCTIONALIZED:  # by name, without what it writes to
        return defaults | {key: node.kwargs[key] for key in defaults.keys() & node.kwargs.keys()}
    values = node.args[2:] if node.target is REPLAYED else node.args
    return defaults | dict(zip(positional, values, strict=False)) | dict(node.kwargs)


@cache
def _parameters(called: torch._ops.OpOverload) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments of an operator with their defaults, and the ones given by position."""
    parameters = called._schema.arguments
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    return defaults, tuple(parameter.name for parameter in parameters if not parameter.kwarg_only)


def count(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """Count the calls of each operator, without those that take results out of tuples."""
    called = (node for node in nodes if node.op == "call_function")
    counts = Counter(name(node) for node in called if short_name(node) != "getitem")
    return dict(sorted(counts.items()))


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether the call changes the state of the random generator."""
    if node.target is REPLAYED:
        return False
    if torch.Tag.nondeterministic_seeded not in getattr(operator(node), "tags", ()):
        return False
    given = arguments(node)
    drops = [given[name] for name in ("dropout", "dropout_p") if name in given]
    return given.get("train") is not False and all(drops)
