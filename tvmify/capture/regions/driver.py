"""A program that calls compiled regions, with control flow in TorchScript or Python."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from tvmify.capture.carrier import Carrier
from tvmify.capture.questions import ASKING
from tvmify.capture.regions.finding import Region, Regions, inner_values, operands
from tvmify.capture.regions.simplifying import simplify
from tvmify.capture.regions.transcribing import Transcript
from tvmify.capture.scripted.arguments import bind, defaults_of
from tvmify.capture.scripted.effects import is_tensor
from tvmify.capture.scripted.program import GraphProgram
from tvmify.capture.scripted.scripting import Scripted
from tvmify.capture.state import resolve
from tvmify.errors import SET_ATTRIBUTE, CaptureError, UnsupportedOperator

#: The operator that a driver calls for a region.
REGION = "tvmify::region"
REGION_SCHEMA = "region(int number, Tensor[] tensors, int[] integers, float[] floats) -> Tensor[]"


class RegionProgram(GraphProgram):
    """A region as a separate program, whose weights a `Carrier` holds."""

    def __init__(self, graph: torch._C.Graph, root: Any, carrier: Carrier, is_python: bool) -> None:
        self.scripted: Any = torch._C._create_function_from_graph("region", graph)
        schema = self.scripted.schema
        # The driver runs it without gradients.
        super().__init__(graph, schema, root, is_python=is_python, checks_modes=False)
        for name, tensor in self._state.tensors.items():
            carrier.carry(name, tensor)
        self._keep_only(carrier)

    def of(self, owner: Any) -> Self:
        """Return the same object: its carrier has the weights, and lives as long as the driver."""
        return self


@dataclass
class Part:
    """A region, cut out of the graph.

    Attributes
    ----------
    program
        Takes the tensors that enter the region, then the integers, then the floats.
    carrier
        The module of this program; holds the weights under their names.
    operators
        Its operators, with how often each occurs.
    booleans
        Indices of bools among the integers.
    in_eager
        Computes the same in PyTorch, with the current weights.
    """

    program: RegionProgram
    carrier: Carrier
    operators: Counter[str]
    booleans: tuple[int, ...]
    in_eager: Callable[..., list[torch.Tensor]]


class Driver:
    """A module or function whose control flow is interpreted, and whose regions are compiled.

    Parameters
    ----------
    scripted
        The scripted module; attributes that forward sets are set on it.
    original
        The module or function before it was scripted; None when there is only ``scripted``.
    number
        Returns a new number for a region.
    call
        Calls a region, as `REGION` does.

    Attributes
    ----------
    parts
        The regions by their numbers, in the order of the code.
    has_effects, is_random
        See `Regions`.
    reads_gradient_modes
        Whether it reads grad mode, or which tensors require gradients.

    Raises
    ------
    CaptureError
        No region is worth compiling, or the control flow of plain code cannot be transcribed to
        Python.
    UnsupportedOperator
        It is plain code with side effects, which its scripted copy would lose.
    """

    def __init__(
        self,
        scripted: Scripted,
        original: Any,
        number: Callable[[], int],
        call: Callable[..., list[torch.Tensor]],
    ) -> None:
        self._scripted: Any = scripted
        self._is_plain = original is not None
        self._attributes: dict[str, Any] = {}
        self._names: set[str] = set()
        self._defaults = defaults_of(original) if self._is_plain else None
        self._is_module = isinstance(scripted, torch.jit.ScriptModule)
        forward = self._scripted.forward if self._is_module else self._scripted
        self._parameters = list(forward.schema.arguments)[self._is_module :]
        self._graph: Any = forward.inlined_graph
        root = self._scripted._c if self._is_module else None
        simplify(self._graph, root)
        self.reads_gradient_modes = any(self._graph.findNode(kind, True) for kind in ASKING)
        regions = Regions(self._graph, root, _attributes_set(self._scripted))
        self.has_effects, self.is_random = regions.has_effects, regions.is_random
        if self._is_plain and self.has_effects:
            raise UnsupportedOperator(
                [SET_ATTRIBUTE], "forward changes attributes, buffers or arguments"
            )
        self._movable = regions.movable
        self._tensors = regions.tensors
        self.parts: dict[int, Part] = {}
        for region in regions.found:
            key = number()
            self.parts[key] = self._cut_out(region, key)
        if not self.parts:
            raise CaptureError(
                "no stretch of code between the branches is long enough to compile",
                "Write the branches with torch.where, or decorate the submodules around them.",
            )
        torch._C._jit_pass_dce(self._graph)
        if self._is_plain:
            self._function: Any = self._transcript(self._graph, {REGION: call})
            self._check_names(original)
            self._scripted = None  # whose tensors may be replaced
        else:
            self._function = torch._C._create_function_from_graph("driver", self._graph)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the inputs of `run` for the arguments of a call.

        Raises
        ------
        UnsupportedInput
            The annotations of forward exclude these arguments.
        """
        values = bind(self._parameters, args, kwargs, self._defaults, as_given=self._is_plain)
        if self._is_plain:
            return values
        return [self._scripted, *values] if self._is_module else values

    def run(self, values: list[Any]) -> Any:
        """Run one call."""
        return self._function(*values)

    def bind(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Take the current tensors of the module, some of which may have been replaced.

        Returns
        -------
        Mapping
            All tensors that the program reads as attributes, by name.
        """
        self._attributes.update((name, resolve(module, name)) for name in self._names)
        tensors = {name: resolve(module, name) for name in self._tensors}
        for part in self.parts.values():
            for name in part.program.weights:
                part.carrier.carry(name, tensors[name])
        return tensors

    def _transcript(
        self, graph: Any, functions: dict[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Transcribe a graph of plain code to Python, so that its numbers follow Python's rules."""
        transcript = Transcript(graph, self._is_module, self._attributes, functions)
        self._names |= transcript.names
        return transcript.function

    def _check_names(self, original: Any) -> None:
        for name in self._names:
            try:
                resolve(original, name)
            except (AttributeError, LookupError, ValueError) as error:
                raise CaptureError(
                    f"{name} is an attribute of the scripted module only", "Assign it in __init__."
                ) from error

    # ----------------------------------------------------------------------- cutting the graph

    def _cut_out(self, region: Region, key: int) -> Part:
        defined = {v.debugName() for node in region.nodes for v in inner_values(node)}
        tensors, numbers, moved = self._entering(region.nodes, defined)
        numbers.sort(key=lambda value: value.type().kind() == "FloatType")  # integers first
        inner = self._region_graph(region, [*tensors, *numbers], moved)
        integers = [value for value in numbers if value.type().kind() != "FloatType"]
        self._replace(region, key, tensors, integers, numbers[len(integers) :])
        carrier = Carrier().eval()
        root = self._scripted._c if self._is_module else None
        places = enumerate(value.type().kind() for value in integers)
        booleans = tuple(place for place, kind in places if kind == "BoolType")
        program = RegionProgram(inner, root, carrier, self._is_plain)
        if self._is_plain:
            in_eager = self._transcript(inner, {})
        else:
            in_eager = functools.partial(
                program.scripted, *((self._scripted,) if self._is_module else ())
            )
        return Part(program, carrier, region.operators, booleans, in_eager)

    def _entering(
        self, nodes: list[torch._C.Node], defined: set[str]
    ) -> tuple[list[torch._C.Value], list[torch._C.Value], list[torch._C.Node]]:
        """Return the tensors and numbers that enter a region, and nodes to copy to its start."""
        seen = set(defined)
        if self._is_module:
            seen.add(next(self._graph.inputs()).debugName())
        tensors: list[torch._C.Value] = []
        numbers: list[torch._C.Value] = []
        moved: list[torch._C.Node] = []

        def enter(value: torch._C.Value) -> None:
            if value.debugName() in seen:
                return
            if value.debugName() in self._movable:
                node = value.node()
                own = [v.debugName() for v in inner_values(node)]
                for operand in operands(node):
                    if operand.debugName() not in own:
                        enter(operand)
                moved.append(node)
                seen.update(own)
                return
            seen.add(value.debugName())
            (tensors if is_tensor(value) else numbers).append(value)

        for node in nodes:
            for operand in operands(node):
                enter(operand)
        return tensors, numbers, moved

    def _region_graph(
        self, region: Region, entering: list[torch._C.Value], moved: list[torch._C.Node]
    ) -> torch._C.Graph:
        inner: Any = torch._C.Graph()
        values: dict[str, Any] = {}
        if self._is_module:
            root = next(self._graph.inputs())
            values[root.debugName()] = inner.addInput("self").setType(root.type())
        for i, value in enumerate(entering):
            # a traced graph has the shapes of one call
            type_ = torch._C.TensorType.get() if is_tensor(value) else value.type()
            values[value.debugName()] = inner.addInput(f"input_{i}").setType(type_)
        for node in [*moved, *region.nodes]:
            copied = inner.createClone(node, lambda value: values[value.debugName()])
            inner.appendNode(copied)
            for old, new in zip(node.outputs(), copied.outputs(), strict=True):
                values[old.debugName()] = new
        results = inner.create("prim::ListConstruct", [values[o] for o in region.outputs], 1)
        inner.appendNode(results)
        inner.registerOutput(results.output().setType(torch._C.ListType.ofTensors()))
        return inner

    def _replace(
        self,
        region: Region,
        key: int,
        tensors: list[torch._C.Value],
        integers: list[torch._C.Value],
        floats: list[torch._C.Value],
    ) -> None:
        """Replace a region by a call, followed by the nodes that later nodes need as well."""
        constant = self._graph.insertConstant(key)
        constant.node().moveBefore(region.nodes[0])
        inserted = _Inserter(self._graph, region.nodes[-1])
        integer = torch._C.IntType.get()
        whole = [
            inserted.create("aten::Int", [value], [integer])[0]
            if value.type().kind() == "BoolType"
            else value
            for value in integers
        ]
        of_tensors = torch._C.ListType.ofTensors()
        types = (of_tensors, torch._C.ListType.ofInts(), torch._C.ListType.ofFloats())
        lists = [
            inserted.create("prim::ListConstruct", items, [type_])[0]
            for items, type_ in zip((tensors, whole, floats), types, strict=True)
        ]
        results = inserted.create(REGION, [constant, *lists], [of_tensors])
        each_type = [torch._C.TensorType.get()] * len(region.outputs)
        unpacked = inserted.create("prim::ListUnpack", results, each_type)
        values = dict(zip(region.outputs, unpacked, strict=True))
        for node in region.replayed:
            copied = inserted.copy(node, lambda v: values.get(v.debugName(), v))
            for old, new in zip(node.outputs(), copied, strict=True):
                values[old.debugName()] = new
                if old.debugName() in self._movable:
                    self._movable.add(new.debugName())
        for node in region.nodes:
            for old in node.outputs():
                if old.debugName() in values:
                    old.replaceAllUsesWith(values[old.debugName()])
        for node in reversed(region.nodes):
            node.destroy()


class _Inserter:
    """Inserts nodes into a graph, one after the other."""

    def __init__(self, graph: Any, last: Any) -> None:
        self._graph, self._last = graph, last

    def create(self, kind: str, inputs: list[Any], types: list[Any]) -> list[Any]:
        """Insert a new node, and return its outputs, of these types."""
        outputs = self._insert(self._graph.create(kind, inputs, len(types)))
        for output, type_ in zip(outputs, types, strict=True):
            output.setType(type_)
        return outputs

    def copy(self, node: Any, values: Callable[[Any], Any]) -> list[Any]:
        """Insert a copy of a node that reads other values, and return its outputs."""
        return self._insert(self._graph.createClone(node, values))

    def _insert(self, node: Any) -> list[Any]:
        node.insertAfter(self._last)
        self._last = node
        return list(node.outputs())


def _attributes_set(scripted: Any) -> frozenset[tuple[str, str]]:
    """Return the class and name of each attribute that a method of the module sets."""
    modules = scripted.modules() if isinstance(scripted, torch.jit.ScriptModule) else ()
    return frozenset(
        (node.inputsAt(0).type().annotation_str, node.s("name"))
        for module in modules
        if isinstance(module, torch.jit.ScriptModule)
        for method in module._c._method_names()
        for node in module._c._get_method(method).graph.findAllNodes("prim::SetAttr", True)
    )
