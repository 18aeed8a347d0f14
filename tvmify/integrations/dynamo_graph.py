"""A graph of ``torch.compile`` as a module: weights are its state, sizes and numbers arguments.

Dynamo passes to a graph, at each call, all that the graph reads: the weights of the model, the
tensors of the call, and an integer for each size that may vary. A dispatcher wants the weights in a
module, so that it packs them once, and reads sizes from the tensors themselves.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext

from tvmify.capture import RecordedGraph
from tvmify.capture.values import recorded_contiguous
from tvmify.integrations.numbers import Compute, take_out

#: Picks some of the arguments of a call.
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True)
class Origin:
    """Where a graph comes from.

    Attributes
    ----------
    label
        For messages: the number of the graph, and the function and line where its code begins.
    backend_id
        The name under which the code that Dynamo made calls the graph. It is unique in a process,
        unlike Dynamo's compilation numbers, which start again after ``torch._dynamo.reset()``.
    parameters
        The identities of the parameters that Dynamo recorded it with.
    """

    label: str
    backend_id: str | None
    parameters: frozenset[int] = frozenset()

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any]) -> Origin:
        """Return that of a graph of Dynamo."""
        number, backend_id = CompileContext.current_compile_id(), module.meta.get("backend_id")
        parameters = frozenset(id(x) for x in inputs if isinstance(x, torch.nn.Parameter))
        for node in module.graph.nodes:
            rows = (node.meta.get("stack_trace") or "").strip().splitlines()
            if node.op not in ("placeholder", "output") and rows:
                file, line, code = rows[0].strip().split(", ")[:3]
                file = file.removeprefix("File ").strip('"').rpartition("/")[2]
                place = f"{file}:{line.removeprefix('line ')}"
                label = f"graph {number} ({code.removeprefix('in ')}, {place})"
                return cls(label, backend_id, parameters)
        return cls(f"graph {number}", backend_id, parameters)

    def part(self, name: str) -> Origin:
        """Return that of a part of the graph."""
        return Origin(f"{self.label}, {name}", self.backend_id, self.parameters)


@dataclass(frozen=True)
class DynamoGraph:
    """What is known of a graph before its first call.

    Attributes
    ----------
    origin
        Where it comes from.
    graph
        Reads weights as attributes, and takes the other arguments.
    attributes
        What the graph reads besides its weights: subgraphs and constants, by name.
    weights
        The name of each weight, in the order of ``pick_weights``.
    floats
        Which arguments of a call are floats that it passes as tensors.
    numbers
        Computes numbers from the arguments of a call, to follow them; None if there are none.
    pick_weights, pick_inputs
        Choose the weights, and the arguments of ``graph``, among those of a call and the numbers.
    symbols
        The sizes that vary, as `Subject.symbols` has them.
    results
        For each result of a call its place among those of ``graph``; or, as ``~i``, that it is
        argument ``i`` of the call. None if the results are those of ``graph``.
    """

    origin: Origin
    graph: fx.Graph
    attributes: Mapping[str, Any]
    weights: tuple[str, ...]
    floats: tuple[int, ...]
    numbers: Compute | None
    pick_weights: Pick
    pick_inputs: Pick
    symbols: Mapping[int, tuple[str | None, ...]]
    results: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        origin: Origin,
        *,
        weights_are_state: bool,
    ) -> DynamoGraph:
        """Read a graph.

        Parameters
        ----------
        module
            From Dynamo or AOTAutograd; it is not changed.
        inputs
            Examples of its arguments.
        origin
            Where it comes from.
        weights_are_state
            Whether parameters and buffers become attributes. Otherwise all tensors are arguments.
        """
        graph = copy.deepcopy(module.graph)
        places = [node for node in graph.nodes if node.op == "placeholder"]
        values = [example_of(node, given) for node, given in zip(places, inputs, strict=True)]
        weights = {
            i: node
            for i, (node, value) in enumerate(zip(places, values, strict=True))
            if weights_are_state and isinstance(value, torch.Tensor) and _is_weight(node, inputs[i])
        }
        floats = [
            i
            for i, value in enumerate(values)
            if isinstance(value, torch.Tensor)
            and i not in weights
            and _read_as_float(graph, places[i])
        ]
        for i in floats:
            values[i] = 0.0  # any number
        tensors = [
            i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and i not in weights
        ]
        sources = _sources_of_sizes(places, values, tensors)
        numbers = [i for i, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        sizes = [i for i in numbers if str(values[i]) in sources]
        computed, compute = take_out(graph, places, numbers, sizes)
        places += computed
        values += [example_of(node, None) for node in computed]
        results = _without_numbers(graph, places, values)
        sizes = _sizes_read_from_tensors(graph, places, values, sources)
        arguments = [i for i in range(len(places)) if i not in weights and i not in sizes]
        for node in weights.values():
            _read_as_attribute(graph, node)
        attributes = {
            str(node.target): _attribute(module, str(node.target))
            for node in graph.nodes
            if node.op in ("get_attr", "call_module")
            and node.target not in {weight.name for weight in weights.values()}
        }
        for node in graph.nodes:
            # without the fake tensors of Dynamo
            node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
            if node.target is torch._C._autograd._get_data_attr:  # type: ignore[attr-defined]
                node.target = torch.Tensor.detach  # torch.export takes the other for a constant
            node.target = _AUTOCAST.get(node.target, node.target)
            if node.op == "call_method" and node.target == "contiguous":
                node.op, node.target = "call_function", recorded_contiguous
        graph.lint()
        return cls(
            origin=origin,
            graph=graph,
            attributes=attributes,
            weights=tuple(node.name for node in weights.values()),
            floats=tuple(floats),
            numbers=compute if computed else None,
            pick_weights=_picker(list(weights)),
            pick_inputs=_picker(arguments),
            symbols=_symbols([values[i] for i in arguments]),
            results=results,
        )

    @property
    def has_numbers(self) -> bool:
        """Whether `with_numbers` changes the arguments of a call."""
        return bool(self.floats) or self.numbers is not None

    def with_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call with its floats, and with the numbers that follow them."""
        if not self.has_numbers:
            return args
        values = list(args)
        for i in self.floats:
            values[i] = values[i].item()
        return (*values, *self.numbers(values)) if self.numbers else tuple(values)

    def module(self, weights: Sequence[torch.Tensor]) -> RecordedGraph:
        """Return the graph as a module with these weights."""
        named = dict(zip(self.weights, weights, strict=True))
        module = RecordedGraph({**self.attributes, **named}, self.graph)
        self.graph.owning_module = None  # otherwise the graph would keep the latest weights alive
        return module.eval()  # whatever depends on the mode is written in the graph


def _enter_autocast(*setting: Any) -> torch.autocast:
    context = torch.autocast(*setting)
    context.__enter__()
    return context


def _exit_autocast(context: torch.autocast) -> None:
    context.__exit__(None, None, None)


#: Functions of Dynamo's graphs that ``torch.export`` records without calling them, so that it
#: records the dtypes of a region without autocast; and those to call instead.
_AUTOCAST: dict[Any, Callable[..., Any]] = {
    torch.amp.autocast_mode._enter_autocast: _enter_autocast,
    torch.amp.autocast_mode._exit_autocast: _exit_autocast,
}


def example_of(node: fx.Node, given: Any) -> Any:
    """Return the example of an argument: with symbols as its sizes, if these vary."""
    return node.meta.get("example_value", node.meta.get("val", given))


def _is_weight(node: fx.Node, given: Any) -> bool:
    """Whether an argument belongs to the model, and is therefore mostly the same in each call."""
    is_static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    return is_static or isinstance(given, torch.nn.Parameter)


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and not value.node.is_constant()


def _without_numbers(
    graph: fx.Graph, places: list[fx.Node], values: list[Any]
) -> tuple[int, ...] | None:
    """Remove results that are arguments; return where the results of a call come from."""
    output = graph.output_node()
    returned = list(output.args[0])  # type: ignore[call-overload,arg-type]
    numbers = {
        node: i
        for i, (node, value) in enumerate(zip(places, values, strict=True))
        if not isinstance(value, torch.Tensor)
    }
    kept = [x for x in returned if not (isinstance(x, fx.Node) and x in numbers)]
    if len(kept) == len(returned):
        return None
    output.args = (tuple(kept),)
    count = iter(range(len(kept)))
    return tuple(
        ~numbers[x] if isinstance(x, fx.Node) and x in numbers else next(count) for x in returned
    )


def _sources_of_sizes(
    places: list[fx.Node], values: list[Any], tensors: list[int]
) -> dict[str, tuple[fx.Node, int]]:
    """Return a tensor and an axis for each size that varies."""
    sources: dict[str, tuple[fx.Node, int]] = {}
    for i in tensors:
        for axis, size in enumerate(values[i].shape):
            if _is_symbol(size):
                sources.setdefault(str(size), (places[i], axis))
    return sources


def _sizes_read_from_tensors(
    graph: fx.Graph,
    places: list[fx.Node],
    values: list[Any],
    sources: Mapping[str, tuple[fx.Node, int]],
) -> set[int]:
    """Read sizes from the tensors that have them; return which arguments are not needed then."""
    unneeded: set[int] = set()
    for i, (node, value) in enumerate(zip(places, values, strict=True)):
        if isinstance(value, torch.Tensor) or (node.users and str(value) not in sources):
            continue
        if node.users:
            tensor, axis = sources[str(value)]
            with graph.inserting_after(places[-1]):
                node.replace_all_uses_with(graph.call_method("size", (tensor, axis)))
        unneeded.add(i)
    for i in unneeded:
        graph.erase_node(places[i])
    return unneeded


def _read_as_float(graph: fx.Graph, node: fx.Node) -> bool:
    """Make an argument a float again, if Dynamo turned a float into a tensor."""
    source = node.meta.get("grapharg")
    if source is None or not source.pass_arg_as_tensor:
        return False
    users = list(node.users)
    if any(user.op != "call_method" or user.target != "item" for user in users):
        return False
    for user in users:
        user.replace_all_uses_with(node)
        graph.erase_node(user)
    node.type = None
    return True


def _read_as_attribute(graph: fx.Graph, node: fx.Node) -> None:
    name = node.name
    with graph.inserting_before(node):
        read = graph.create_node("get_attr", name)
    node.replace_all_uses_with(read)
    graph.erase_node(node)


def _attribute(module: torch.nn.Module, name: str) -> Any:
    return operator.attrgetter(name)(module)


def _symbols(values: Sequence[Any]) -> dict[int, tuple[str | None, ...]]:
    """Return a name for each size that varies: one for those that are equal in all calls."""
    names: dict[str, str] = {}

    def name(size: Any) -> str | None:
        return names.setdefault(str(size), f"s{len(names)}") if _is_symbol(size) else None

    shapes = {
        # an int may be recorded as a size: see `SizeArgument`
        leaf: value.shape if isinstance(value, torch.Tensor) else (value, 0)
        for leaf, value in enumerate(values)
    }
    found = {leaf: tuple(map(name, shape)) for leaf, shape in shapes.items()}
    return {leaf: axes for leaf, axes in found.items() if any(axes)}


def _picker(places: Sequence[int]) -> Pick:
    if not places:
        return lambda _: ()
    if list(places) == list(range(places[0], places[-1] + 1)):
        return operator.itemgetter(slice(places[0], places[-1] + 1))
    return operator.itemgetter(*places)
