"""A TorchScript graph written as a Python function, so that numbers follow Python's rules.

TorchScript's interpreter wraps integers at 64 bits, divides by zero, and crashes on ``5 % 0``. The
function has a line for each node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tvmify.capture.regions.expressions import ANOTHER_WAY, Expressions, refusal, tuple_of
from tvmify.capture.regions.finding import operands, with_nested
from tvmify.capture.scripted.effects import writes
from tvmify.capture.state import ModulePath
from tvmify.errors import CaptureError

#: Types of values whose memory is freed as early as in eager.
_HELD = ("TensorType", "ListType", "TupleType", "OptionalType", "DictType")


class Raised(Exception):
    """The code raises an exception that only eager PyTorch can reproduce."""


class Transcript:
    """A graph as a Python function.

    Parameters
    ----------
    graph
        Inlined.
    is_method
        Whether the first input is the module.
    attributes
        Values of the attributes that it reads, by dotted name; looked up at each call.
    functions
        Functions for our own kinds of nodes.

    Attributes
    ----------
    names
        Dotted names of the attributes.
    source
        The function as text.
    function
        The function.

    Raises
    ------
    CaptureError
        A node has no equivalent in Python.
    """

    def __init__(
        self,
        graph: Any,
        is_method: bool,
        attributes: Mapping[str, Any],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.names: set[str] = set()
        self._expressions = Expressions(functions)
        self._aliases: Any = graph.alias_db()
        self._paths: dict[str, ModulePath] = {}
        self._lines: list[str] = []
        self._indent = ""
        inputs = list(graph.inputs())
        if is_method:
            self._paths[inputs.pop(0).debugName()] = ModulePath("")
        self._write(f"def transcript({', '.join(self._new_variables(inputs))}):")
        with self._indented():
            self._block(graph)
            self._write(f"return {', '.join(self._values(graph.outputs())) or None}")
        self.source = "\n".join(self._lines)
        namespace = self._expressions.namespace | {"attributes": attributes, "Raised": Raised}
        try:
            exec(compile(self.source, "<transcript>", "exec"), namespace)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise CaptureError(
                "control flow is nested more deeply than Python allows", ANOTHER_WAY
            ) from error
        self.function: Callable[..., Any] = namespace["transcript"]

    def _write(self, line: str) -> None:
        self._lines.append(self._indent + line)

    @contextlib.contextmanager
    def _indented(self) -> Iterator[None]:
        outer = self._indent
        self._indent += "    "
        yield
        self._indent = outer

    def _values(self, values: Any) -> list[str]:
        return list(map(self._expressions.value, values))

    def _new_variables(self, values: Any) -> list[str]:
        return list(map(self._expressions.new_variable, values))

    # ------------------------------------------------------------------------------------- nodes

    def _block(self, block: Any) -> None:
        nodes = list(block.nodes())
        dying = _dying(nodes, kept={output.debugName() for output in block.outputs()})
        for node, names in zip(nodes, dying, strict=True):
            self._node(node)
            # as early as in eager; else all results would stay in memory until the end of the call
            self._delete(names)

    def _delete(self, names: Iterable[str]) -> None:
        """Delete the variables of values; others have none."""
        variables = self._expressions.variables
        if dying := [variables[name] for name in names if name in variables]:
            self._write(f"del {', '.join(dying)}")

    def _node(self, node: Any) -> None:
        kind = node.kind()
        outputs = list(node.outputs())
        if kind == "prim::Constant":
            self._expressions.define_constant(outputs[0])
        elif kind == "prim::GetAttr":
            self._attribute(node, outputs[0])
        elif kind == "prim::If":
            self._if(node, outputs)
        elif kind == "prim::Loop":
            self._loop(node, outputs)
        elif kind == "prim::RaiseException":
            self._write("raise Raised")
        elif kind in ("prim::TupleUnpack", "prim::ListUnpack"):
            given = self._expressions.value(node.input())
            if outputs:
                self._write(f"{self._targets(outputs)} = {given}")
        else:
            expression = self._expressions.of(node)
            if len(outputs) == 1:
                self._write(f"{self._expressions.new_variable(outputs[0])} = {expression}")
            elif outputs:
                self._write(f"{self._targets(outputs)} = {expression}")
            else:
                self._write(expression)

    def _targets(self, outputs: list[Any]) -> str:
        return tuple_of(self._new_variables(outputs))

    def _attribute(self, node: Any, output: Any) -> None:
        owner = self._paths.get(node.input().debugName())
        if owner is None:
            raise refusal(node, "an attribute of an object is read")
        name = owner.attribute(node.s("name"))
        if output.type().kind() == "ClassType":
            self._paths[output.debugName()] = ModulePath(name)
            return
        self.names.add(name)
        self._write(f"{self._expressions.new_variable(output)} = attributes[{name!r}]")

    def _if(self, node: Any, outputs: list[Any]) -> None:
        first, second = node.blocks()
        targets = self._new_variables(outputs)
        self._write(f"if {self._expressions.value(node.input())}:")
        self._branch(first, targets)
        self._write("else:")
        self._branch(second, targets)

    def _branch(self, block: Any, targets: list[str]) -> None:
        with self._indented():
            self._block(block)
            self._yield(block, targets)
            self._write("pass")

    def _loop(self, node: Any, outputs: list[Any]) -> None:
        (body,) = node.blocks()
        self._refuse_growth(node)
        limit, condition, *carried = self._values(node.inputs())
        index, *names = self._new_variables(body.inputs())
        going = f"go_on{len(self._lines)}"
        start = tuple_of(["0", condition, *carried])
        self._write(f"{tuple_of([index, going, *names])} = {start}")
        self._write(f"while {going} and {index} < {limit}:")
        with self._indented():
            self._block(body)
            self._yield(body, [going, *names])
            self._write(f"{index} += 1")
        if outputs:
            self._write(f"{self._targets(outputs)} = {tuple_of(names)}")
            pairs = zip(list(body.inputs())[1:], outputs, strict=True)
            self._delete(inside.debugName() for inside, outside in pairs if _is_held(outside))

    def _yield(self, block: Any, targets: list[str]) -> None:
        """Assign the results of a block, and delete their names inside the block."""
        if not targets:
            return
        results = list(block.outputs())
        self._write(f"{tuple_of(targets)} = {tuple_of(self._values(results))}")
        own = {value.debugName() for node in block.nodes() for value in node.outputs()}
        names = (value.debugName() for value in results if _is_held(value))
        self._delete(dict.fromkeys(name for name in names if name in own))

    def _refuse_growth(self, loop: Any) -> None:
        """Refuse a loop over a list that its body changes, whose length Python reads each time."""
        length = loop.inputsAt(0).node()
        lengths = [length] + [value.node() for value in length.inputs()]  # min of some, for zip
        lists = [n.inputsAt(0) for n in lengths if n.kind() == "aten::len"]
        for node in with_nested(loop):
            is_write = writes(node) and node.inputsAt(0).type().kind() == "ListType"
            if is_write and any(
                self._aliases.may_contain_alias(node.inputsAt(0), iterated) for iterated in lists
            ):
                raise refusal(node, "a list is changed while it is iterated over")


def _dying(nodes: list[Any], kept: set[str]) -> list[list[str]]:
    """Return, for each node of a block, the names of results that no later node reads.

    Parameters
    ----------
    kept
        Names of the results of the block.
    """
    last = {
        value.debugName(): place for place, node in enumerate(nodes) for value in operands(node)
    }
    dying: list[list[str]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for output in node.outputs():
            name = output.debugName()
            if _is_held(output) and name not in kept:
                dying[last.get(name, place)].append(name)
    return dying


def _is_held(value: Any) -> bool:
    return value.type().kind() in _HELD
