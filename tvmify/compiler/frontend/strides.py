"""Finds the arguments whose strides decide what a program reads, shares or writes.

A program is recorded with contiguous arguments. With others, ``reshape`` may return a copy where it
returned a view, or the other way round, and ``as_strided`` reads other elements.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from tvmify.compiler.aten import aliases, operators
from tvmify.compiler.frontend import memory
from tvmify.torch_compat.symbols import identities_of

#: Operators that return a view, or a copy where strides allow none.
_RESHAPES = frozenset("reshape reshape_as flatten ravel".split())
#: Operators whose results are contiguous, whatever their operands are.
_CONTIGUOUS = frozenset(
    "addmm baddbmm bmm contiguous embedding layer_norm linear matmul mm native_layer_norm".split()
)
_FORMATS = (None, torch.preserve_format)


def decisive_tensors(graph: fx.Graph, arguments: Collection[fx.Node]) -> set[fx.Node]:
    """Return the placeholders that a recording holds for contiguous tensors only.

    Parameters
    ----------
    arguments
        The placeholders whose strides what is computed from them may have. Weights are not among
        them: their own memory counts, but a result has the strides of another operand.
    """
    return _Strides(graph, arguments).decisive()


def lineage(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a value, what it is a view of, and so on."""
    current: fx.Node | None = node
    while current is not None:
        yield current
        current = viewed(current)


class _Strides:
    """Follows memory and strides through a graph.

    Attributes
    ----------
    parents
        For each value that is, or may be, a view: the value that it is of.
    sources
        For each value: the placeholders whose strides may decide its strides.
    relatives
        For each value without parent: the values that are, or may be, in its memory.
    """

    def __init__(self, graph: fx.Graph, arguments: Collection[fx.Node]) -> None:
        self.arguments = frozenset(arguments)
        self.nodes = list(graph.nodes)
        self.places = {node: place for place, node in enumerate(self.nodes)}
        self.returned = set(graph.output_node().all_input_nodes)
        self.writes = [node for node in operators.calls(graph) if operators.is_mutating(node)]
        self.parents: dict[fx.Node, fx.Node] = {}
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.relatives: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            parent = viewed(node) if node.op == "call_function" else None
            if parent is not None:
                self.parents[node] = parent
            self.sources[node] = self._sources(node)
            *_, root = self._lineage(node)
            self.relatives.setdefault(root, []).append(node)

    def decisive(self) -> set[fx.Node]:
        """Return the placeholders whose strides decide what is read, shared or written."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node.target is torch.ops.aten.as_strided.default:
                found |= self.sources[node.args[0]]  # type: ignore[index]
            elif node in self.parents and _may_copy(node) and self._shows(node):
                found |= self.sources[self.parents[node]]
        return found

    def _sources(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op == "placeholder":
            value = node.meta.get("val")
            return frozenset([node] if isinstance(value, torch.Tensor) and value.dim() else [])
        if isinstance(node.target, torch._ops.OpOverload):
            is_fresh = operators.base_name(node) in _CONTIGUOUS
            if is_fresh and _format(node) in (*_FORMATS, torch.contiguous_format):
                return frozenset()
        if node in self.parents:
            return self.sources[self.parents[node]]
        found = (self.sources[each] for each in node.all_input_nodes)
        return frozenset[fx.Node]().union(*found) & self.arguments

    def _lineage(self, node: fx.Node) -> Iterator[fx.Node]:
        yield node
        while (parent := self.parents.get(node)) is not None:
            yield (node := parent)

    def _shows(self, copy: fx.Node) -> bool:
        """Whether it shows if a value is a view or a copy: both sides are returned, or one is
        written and the other is read later.
        """
        *_, root = self._lineage(copy)
        inside = {node for node in self.relatives[root] if copy in self._lineage(node)}
        outside = set(self.relatives[root]) - inside
        is_callers = root.op != "call_function"
        if self.returned & inside and (is_callers or self.returned & outside):
            return True
        for write in self.writes:
            if self.places[write] <= self.places[copy]:
                continue
            written = set(aliases.written_tensors(write))
            if written & inside and (is_callers or self._are_read(outside, write)):
                return True
            if written & outside and self._are_read(inside, write):
                return True
        return False

    def _are_read(self, values: set[fx.Node], write: fx.Node) -> bool:
        """Whether anything takes one of the values after a write."""
        place = self.places[write]
        return any(self.places[user] > place for value in values for user in value.users)


def viewed(node: fx.Node) -> fx.Node | None:
    """Return what a value may be a view of; of an item of a list of views, the list."""
    if isinstance(node.target, torch._ops.OpOverload):
        called = node
    elif node.target is operator.getitem:
        called = node.all_input_nodes[0]
    else:
        return None
    if (whole := _aliased(called)) is not None:
        return whole if called is node else called
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    tensors = (x for x in called.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor))
    return next((x for x in tensors if memory.storage(x) == memory.storage(node)), None)


def _aliased(node: fx.Node) -> fx.Node | None:
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return aliases.argument_returned(node, written=False) if is_operator else None


def _format(node: fx.Node) -> torch.memory_format | None:
    return operators.arguments(node).get("memory_format")


def _may_copy(node: fx.Node) -> bool:
    """Whether strides decide if a value is a view; a scalar has none."""
    value = node.meta.get("val")
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    if not is_operator or not isinstance(value, torch.Tensor) or not value.dim():
        return False
    name = operators.base_name(node)
    if name in _RESHAPES:
        return _merges(node.args[0].meta["val"], value)  # type: ignore[union-attr]
    return name == "contiguous" or (name == "to" and _format(node) not in _FORMATS)


def _merges(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a reshape makes one axis of several; one that only splits axes is always a view."""
    rest = [size for size in identities_of(after.shape) if size != 1]
    for size in identities_of(before.shape):
        part: Any = 1
        while sympy.expand(part - size) != 0:
            if not rest:
                return True
            part *= rest.pop(0)
    return False
