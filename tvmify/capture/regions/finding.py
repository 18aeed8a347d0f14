"""Finds the parts of a TorchScript graph that can be compiled when the whole cannot. A region is a
run of nodes of one block whose result shapes follow from the shapes and numbers that enter it:
nothing in it depends on elements of tensors, draws, or has side effects. It may contain branches on
shapes but no loops, since each number of iterations would be another program. Everything between
regions is left to the TorchScript interpreter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tvmify.capture.scripted.effects import (
    EFFECTS,
    computes,
    is_random,
    is_tensor,
    reads_elements,
    writes,
)
from tvmify.capture.scripted.interpreter import interprets
from tvmify.capture.state import ModulePath
from tvmify.errors import PRINT, SET_ATTRIBUTE

#: Regions of fewer operators are not worth a call.
_FEWEST_OPERATORS = 3
#: What takes items out of containers.
_READERS = (
    "aten::__getitem__ aten::get aten::values aten::items aten::pop aten::popitem prim::TupleIndex "
    "prim::TupleUnpack prim::ListUnpack"
).split()
#: Types of numbers that may enter a region and select its program.
NUMBERS = ("IntType", "BoolType", "FloatType")


class _NotInside(Exception):
    """A branch must stay outside regions, since its results may alias its inputs."""

    def __init__(self, node: torch._C.Node) -> None:
        self.name = next(output.debugName() for output in node.outputs())


@dataclass
class Region:
    """A run of nodes to compile.

    Attributes
    ----------
    nodes
        Nodes of one block, in order. There may be others between them, on which these do not
        depend.
    outputs
        Names of the tensors that later nodes use.
    replayed
        The nodes that also stay outside: numbers, lists and views of outputs.
    operators
        What it computes, with how often it is written.
    """

    nodes: list[torch._C.Node]
    outputs: list[str]
    replayed: list[torch._C.Node]
    operators: Counter[str]


def with_nested(node: torch._C.Node) -> Iterator[torch._C.Node]:
    """Yield a node and, recursively, all nodes of its blocks."""
    yield node
    for block in node.blocks():
        for inner in block.nodes():
            yield from with_nested(inner)


class Regions:
    """The regions of a graph, found in one walk without changing it.

    Parameters
    ----------
    graph
        An inlined graph, with writes removed as far as possible.
    root
        The module; None for a function.
    changing
        Class and name of each attribute that some method sets.

    Attributes
    ----------
    found
        The regions, in the order of the graph.
    movable
        Names of values that any region may recompute from its inputs.
    tensors
        Dotted names of the tensor attributes that the program reads.
    has_effects
        Whether the program sets attributes, or writes to something that may outlive the call.
    is_random
        Whether it draws from a generator.
    """

    def __init__(
        self,
        graph: Any,
        root: torch._C.ScriptModule | None,
        changing: frozenset[tuple[str, str]],
    ) -> None:
        self._graph = graph
        self._root: Any = root
        self._changing = changing
        self._aliases: Any = graph.alias_db()
        self._outside: set[str] = set()
        self.tensors: set[str] = set()
        self._paths: dict[str, ModulePath] = {}
        if root is not None:
            self._find_attributes()
        while True:
            try:
                self._walk()
                return
            except _NotInside as branch:
                self._outside.add(branch.name)

    def _walk(self) -> None:
        self.found: list[Region] = []
        self.movable: set[str] = set()
        self.is_random = False
        self._varying: set[str] = set()  # numbers that may differ between calls of one shape
        inputs = list(self._graph.inputs())[self._root is not None :]
        attributes = (node.output() for node in self._graph.findAllNodes("prim::GetAttr", True))
        lasting = [*inputs, *(v for v in attributes if v.type().kind() != "ClassType")]
        self.has_effects = any(map(self._aliases.has_writers, self._with_items(lasting)))
        self._block(self._graph)

    def _find_attributes(self) -> None:
        """Find the modules that the graph goes through, and the tensors that it reads."""
        self._paths[next(self._graph.inputs()).debugName()] = ModulePath("")
        for node in self._graph.findAllNodes("prim::GetAttr", True):
            path = self._paths.get(node.input().debugName())
            if path is None:
                continue
            name, value = path.attribute(node.s("name")), self._attribute(path, node)
            if isinstance(value, torch.Tensor):
                self.tensors.add(name)
            elif isinstance(value, torch._C.ScriptModule) and not self._is_changing(node):
                self._paths[node.output().debugName()] = ModulePath(name)

    def _with_items(self, containers: Iterable[torch._C.Value]) -> list[torch._C.Value]:
        """Return values, and what the graph takes out of them, to any depth."""
        found = {value.debugName(): value for value in containers}
        readers = [node for kind in _READERS for node in self._graph.findAllNodes(kind, True)]
        while True:
            items = [v for n in readers if _first(n) in found for v in n.outputs()]
            if found.keys() >= {value.debugName() for value in items}:
                return list(found.values())
            found |= {value.debugName(): value for value in items}

    def _block(self, block: Any) -> None:
        run: list[torch._C.Node] = []
        defined: set[str] = set()
        for node in block.nodes():
            if self._belongs(node, defined):
                outputs = list(node.outputs())
                leaf = node.kind() in ("prim::Constant", "prim::GetAttr")
                if leaf or (_is_cheap(node) and not any(map(is_tensor, outputs))):
                    self.movable |= {value.debugName() for value in outputs}
                    if leaf or all(v.debugName() not in defined for v in operands(node)):
                        continue  # stays in place and is recomputed where needed
                run.append(node)
                defined |= {value.debugName() for value in inner_values(node)}
                continue
            if self._has_effects(node) or any(v.debugName() in defined for v in node.inputs()):
                self._close(run, defined)
                run, defined = [], set()
            self._stays(node)
        self._close(run, defined)

    # ------------------------------------------------------------------------- what is in a region

    def _belongs(self, node: torch._C.Node, defined: set[str]) -> bool:
        """Whether a node may join the region that defines these values so far."""
        kind = node.kind()
        if kind == "prim::Constant":
            return node.output().type().kind() != "FunctionType"
        if kind == "prim::GetAttr":
            return self._is_weight(node)
        if not all(v.debugName() in defined or self._enters(v) for v in node.inputs()):
            return False
        if kind == "prim::If":
            if any(output.debugName() in self._outside for output in node.outputs()):
                return False
            return all(self._is_inside(block, defined) for block in node.blocks())
        if kind == "prim::Loop" or kind in EFFECTS or not interprets(node):
            return False
        values = [*node.inputs(), *node.outputs()]
        return not (
            writes(node)
            or reads_elements(node)
            or is_random(node, self._known)
            or any(self._aliases.has_writers(value) for value in values)
        )

    def _is_inside(self, block: Any, defined: set[str]) -> bool:
        inner = set(defined)
        for node in block.nodes():
            # a check of shapes, whose result is known at capture
            if node.kind() != "prim::RaiseException" and not self._belongs(node, inner):
                return False
            inner |= {value.debugName() for value in node.outputs()}
        return all(v.debugName() in inner or self._enters(v) for v in block.outputs())

    def _enters(self, value: torch._C.Value) -> bool:
        name = value.debugName()
        if is_tensor(value):
            return not self._aliases.has_writers(value)
        is_number = value.type().kind() in NUMBERS and name not in self._varying
        return name in self.movable or is_number

    def _is_weight(self, node: torch._C.Node) -> bool:
        """Whether an attribute is the same in all calls, or is watched for changes."""
        path = self._paths.get(node.input().debugName())
        if path is None or self._is_changing(node):
            return False
        value = self._attribute(path, node)
        if isinstance(value, torch.Tensor):
            is_registered = self._is_registered(path, node)
            return is_registered and not self._aliases.has_writers(node.output())
        plain = (bool, int, float, str, torch._C.ScriptModule)
        return value is None or isinstance(value, plain)

    def _is_changing(self, node: torch._C.Node) -> bool:
        owner: Any = node.input().type()
        return (owner.annotation_str, node.s("name")) in self._changing

    def _attribute(self, path: ModulePath, node: torch._C.Node) -> Any:
        value = self._root
        for part in path.attribute(node.s("name")).split("."):
            value = value.getattr(part)
        return value

    def _is_registered(self, path: ModulePath, node: torch._C.Node) -> bool:
        owner = self._root
        for part in path.split(".") if path else ():
            owner = owner.getattr(part)
        dicts: list[Any] = [torch._C.ParameterDict(owner), torch._C.BufferDict(owner)]
        return any(name == node.s("name") for found in dicts for name, _ in found.items())

    def _known(self, value: torch._C.Value) -> Any:
        node = value.node()
        if node.kind() == "prim::Constant":
            return value.toIValue()
        if node.kind() == "prim::GetAttr" and self._is_weight(node):
            return self._attribute(self._paths[node.input().debugName()], node)
        return value

    # --------------------------------------------------------------------- what is not in a region

    def _has_effects(self, node: torch._C.Node) -> bool:
        """Whether a region must not be moved across a node."""
        kind = node.kind()
        if kind == "prim::GetAttr":
            return False
        return kind in EFFECTS or bool(list(node.blocks())) or writes(node) or not interprets(node)

    def _stays(self, node: torch._C.Node) -> None:
        """Walk through a node that is left to the interpreter."""
        kind = node.kind()
        self.has_effects |= kind in (SET_ATTRIBUTE, PRINT)
        if kind not in ("prim::If", "prim::Loop", "prim::GetAttr", "prim::SetAttr"):
            self.is_random |= is_random(node, self._known)
        blocks: list[Any] = list(node.blocks())
        for block in blocks:
            self._varying |= {value.debugName() for value in block.inputs()}
            self._block(block)
        if kind == "prim::If" and self._enters(node.input()):
            # known where the condition is, like numbers that both branches know
            for output, *yielded in zip(
                node.outputs(), *(block.outputs() for block in blocks), strict=True
            ):
                if not all(map(self._enters, yielded)):
                    self._varying.add(output.debugName())
        else:
            self._varying |= {value.debugName() for value in node.outputs()}

    # ------------------------------------------------------------------------------------ results

    def _close(self, run: list[torch._C.Node], defined: set[str]) -> None:
        nested = (node for top in run for node in with_nested(top))
        operators = Counter(node.kind().partition("::")[2] for node in nested if computes(node))
        entering = [v for node in run for v in operands(node) if v.debugName() not in defined]
        if not any(is_tensor(v) and v.debugName() not in self.movable for v in entering):
            return  # only weights and constants: an operator without tensors is not dispatched
        if operators.total() < _FEWEST_OPERATORS:
            return
        inside = Counter(value.debugName() for node in run for value in operands(node))
        wanted = [
            value
            for node in run
            for value in node.outputs()
            if len(value.uses()) > inside[value.debugName()]
        ]
        outputs, replayed = self._results(run, defined, wanted)
        if outputs:
            self.found.append(Region(run, outputs, replayed, operators))

    def _results(
        self, run: list[torch._C.Node], defined: set[str], wanted: list[torch._C.Value]
    ) -> tuple[list[str], list[torch._C.Node]]:
        """Divide what later nodes need into outputs of the region and nodes to replay outside."""
        places = {v.debugName(): i for i, node in enumerate(run) for v in node.outputs()}
        outputs: dict[str, None] = {}
        replayed: set[int] = set()
        while wanted:
            value = wanted.pop()
            place = places[value.debugName()]
            node = run[place]
            if is_tensor(value) and computes(node):
                outputs[value.debugName()] = None
            elif _is_cheap(node) or node.kind() != "prim::If":
                if place not in replayed:
                    replayed.add(place)
                    wanted += [v for v in operands(node) if v.debugName() in places]
            elif is_tensor(value) and not self._may_alias_inputs(value, run, defined):
                outputs[value.debugName()] = None
            else:
                raise _NotInside(node)
        return sorted(outputs, key=places.__getitem__), [run[place] for place in sorted(replayed)]

    def _may_alias_inputs(
        self, value: torch._C.Value, run: list[torch._C.Node], defined: set[str]
    ) -> bool:
        entering = [v for node in run for v in operands(node) if v.debugName() not in defined]
        weights = [
            inner.output()
            for node in run
            for inner in with_nested(node)
            if inner.kind() in ("prim::GetAttr", "prim::Constant")
        ]
        return any(
            is_tensor(other) and self._aliases.may_contain_alias(value, other)
            for other in (*entering, *weights)
        )


def operands(node: torch._C.Node) -> list[torch._C.Value]:
    """Return the inputs of a node and its blocks, including values defined inside."""
    values = []
    for inner in with_nested(node):
        values += inner.inputs()
        for block in inner.blocks():
            values += block.outputs()
    return values


def inner_values(node: torch._C.Node) -> list[torch._C.Value]:
    """Return the values that a node and the nodes of its blocks define."""
    return [value for inner in with_nested(node) for value in inner.outputs()]


def _is_cheap(node: torch._C.Node) -> bool:
    """Whether a node computes no elements, so that it may run twice."""
    return not any(computes(inner) for inner in with_nested(node))


def _first(node: torch._C.Node) -> str:
    return next(node.inputs()).debugName()
