"""A TorchScript graph written as a Python function, so that numbers follow Python's rules.

TorchScript's interpreter wraps integers at 64 bits, divides by zero, and crashes on ``5 % 0``. The
function has a line for each node: operators on numbers, strings and containers are Python's own,
those on tensors call the dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvmify.capture.scripted.effects import writes
from tvmify.capture.scripted.interpreter import interprets, where
from tvmify.capture.scripted.meaning import python_meaning
from tvmify.capture.scripted.named_tuples import named_tuple_class
from tvmify.capture.scripted.operators import DispatcherOperator, find_operator, qualified_name
from tvmify.capture.state import ModulePath
from tvmify.capture.values import DTYPES, code_of, dtype_of
from tvmify.errors import CaptureError

_ANOTHER_WAY = "Rewrite it, or decorate the submodules around it."

#: Operators of Python values, where ``find_operator`` would return a function.
_EXPRESSIONS = {
    "aten::add": "{0} + {1}",
    "aten::sub": "{0} - {1}",
    "aten::mul": "{0} * {1}",
    "aten::div": "{0} / {1}",
    "aten::floordiv": "{0} // {1}",
    "aten::remainder": "{0} % {1}",
    "aten::neg": "-{0}",
    "aten::lt": "{0} < {1}",
    "aten::le": "{0} <= {1}",
    "aten::gt": "{0} > {1}",
    "aten::ge": "{0} >= {1}",
    "aten::eq": "{0} == {1}",
    "aten::ne": "{0} != {1}",
    "aten::__and__": "{0} & {1}",
    "aten::__or__": "{0} | {1}",
    "aten::__xor__": "{0} ^ {1}",
    "aten::__not__": "not {0}",
    "aten::__is__": "{0} is {1}",
    "aten::__isnot__": "{0} is not {1}",
    "aten::__contains__": "{1} in {0}",
    "aten::__getitem__": "{0}[{1}]",
    "prim::StringIndex": "{0}[{1}]",
    "prim::TupleIndex": "{0}[{1}]",
    "aten::len": "len({0})",
    "aten::Int": "int({0})",
    "aten::Float": "float({0})",
    "aten::Bool": "bool({0})",
    "prim::IfThenElse": "{1} if {0} else {2}",
    "prim::Uninitialized": "None",
    "prim::tolist": "{0}.tolist()",
}
#: Nodes whose value has a type in eager that TorchScript lacks.
_OF_TENSORS = {
    "aten::size": ("{0}.shape", "{0}.size({1})"),
    "aten::stride": ("{0}.stride()", "{0}.stride({1})"),
    "aten::dim": ("{0}.dim()",),
    "aten::numel": ("{0}.numel()",),
    "aten::item": ("{0}.item()",),
    "aten::IntImplicit": ("{0}.item()",),
    "aten::FloatImplicit": ("{0}.item()",),
    "aten::ScalarImplicit": ("{0}.item()",),
}
_IDENTITIES = ("prim::unchecked_cast", "prim::unchecked_unwrap_optional", "aten::_unwrap_optional")
#: Nodes that return a dtype or layout as a number.
_CODES = ("prim::dtype", "prim::layout")
_TEXTS = ("aten::str", "aten::format", "aten::percentFormat")
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
        self._functions = functions
        self._aliases: Any = graph.alias_db()
        self._lines: list[str] = []
        self._values: dict[str, str] = {}
        self._paths: dict[str, ModulePath] = {}
        self._namespace: dict[str, Any] = {"attributes": attributes, "Raised": Raised}
        self._objects: dict[int, str] = {}
        inputs = list(graph.inputs())
        if is_method:
            self._paths[inputs.pop(0).debugName()] = ModulePath("")
        parameters = ", ".join(map(self._new, inputs))
        self._lines.append(f"def transcript({parameters}):")
        self._block(graph, "    ")
        results = [self._value(output) for output in graph.outputs()]
        self._lines.append(f"    return {', '.join(results) or None}")
        self.source = "\n".join(self._lines)
        try:
            exec(compile(self.source, "<transcript>", "exec"), self._namespace)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise CaptureError(
                "control flow is nested more deeply than Python allows", _ANOTHER_WAY
            ) from error
        self.function: Callable[..., Any] = self._namespace["transcript"]

    # ------------------------------------------------------------------------------------- names

    def _new(self, value: Any) -> str:
        text = self._values[value.debugName()] = f"v{len(self._values)}"
        return text

    def _value(self, value: Any) -> str:
        name = value.debugName()
        if name not in self._values:
            raise _refusal(value.node(), "a module or another object is passed to a function")
        return self._values[name]

    def _object(self, value: Any) -> str:
        name = self._objects.setdefault(id(value), f"o{len(self._objects)}")
        self._namespace[name] = value  # which keeps the id its own
        return name

    # ------------------------------------------------------------------------------------- nodes

    def _block(self, block: Any, indent: str) -> None:
        nodes = list(block.nodes())
        last: dict[str, int] = {}
        kept = {output.debugName() for output in block.outputs()}
        for place, node in enumerate(nodes):
            for name in _reads(node):
                last[name] = place
        dying: dict[int, list[str]] = {}
        for place, node in enumerate(nodes):
            for output in node.outputs():
                name = output.debugName()
                if output.type().kind() in _HELD and name not in kept:
                    dying.setdefault(last.get(name, place), []).append(name)
        for place, node in enumerate(nodes):
            self._node(node, indent)
            # as early as in eager; else all results would stay in memory until the end of the call
            values = [self._values[name] for name in dying.get(place, ()) if name in self._values]
            if names := [value for value in values if value.startswith("v")]:
                self._lines.append(f"{indent}del {', '.join(names)}")

    def _node(self, node: Any, indent: str) -> None:
        kind = node.kind()
        outputs = list(node.outputs())
        if kind == "prim::Constant":
            self._constant(outputs[0])
        elif kind == "prim::GetAttr":
            self._attribute(node, outputs[0], indent)
        elif kind == "prim::If":
            self._if(node, outputs, indent)
        elif kind == "prim::Loop":
            self._loop(node, outputs, indent)
        elif kind == "prim::RaiseException":
            self._lines.append(f"{indent}raise Raised")
        elif kind in ("prim::TupleUnpack", "prim::ListUnpack"):
            given = self._value(node.input())
            if outputs:
                self._lines.append(f"{indent}{self._targets(outputs)} = {given}")
        else:
            expression = self._expression(node)
            if len(outputs) == 1:
                self._lines.append(f"{indent}{self._new(outputs[0])} = {expression}")
            elif outputs:
                self._lines.append(f"{indent}{self._targets(outputs)} = {expression}")
            else:
                self._lines.append(f"{indent}{expression}")

    def _targets(self, outputs: list[Any]) -> str:
        return "".join(f"{self._new(output)}, " for output in outputs).rstrip()

    def _constant(self, output: Any) -> None:
        if output.type().kind() == "FunctionType":
            return  # of a call that has been inlined
        value = output.toIValue()
        is_finite = type(value) is not float or math.isfinite(value)
        if (value is None or type(value) in (bool, int, float, str)) and is_finite:
            text = repr(value)
            text = f"({text})" if text.startswith("-") else text
        else:
            text = self._object(value)
        self._values[output.debugName()] = text

    def _attribute(self, node: Any, output: Any, indent: str) -> None:
        owner = self._paths.get(node.input().debugName())
        if owner is None:
            raise _refusal(node, "an attribute of an object is read")
        name = owner.attribute(node.s("name"))
        if output.type().kind() == "ClassType":
            self._paths[output.debugName()] = ModulePath(name)
            return
        self.names.add(name)
        self._lines.append(f"{indent}{self._new(output)} = attributes[{name!r}]")

    def _if(self, node: Any, outputs: list[Any], indent: str) -> None:
        first, second = node.blocks()
        targets = [self._new(output) for output in outputs]
        self._lines.append(f"{indent}if {self._value(node.input())}:")
        self._branch(first, targets, indent + "    ")
        self._lines.append(f"{indent}else:")
        self._branch(second, targets, indent + "    ")

    def _branch(self, block: Any, targets: list[str], indent: str) -> None:
        self._block(block, indent)
        self._yield(block, targets, list(block.outputs()), indent)
        self._lines.append(f"{indent}pass")

    def _loop(self, node: Any, outputs: list[Any], indent: str) -> None:
        (body,) = node.blocks()
        self._refuse_growth(node)
        limit, condition, *carried = [self._value(value) for value in node.inputs()]
        index, *names = [self._new(value) for value in body.inputs()]
        going = f"go_on{len(self._lines)}"
        inner = indent + "    "
        self._lines.append(f"{indent}{_tuple([index, going, *names])} = "
                           f"{_tuple(['0', condition, *carried])}")  # fmt: skip
        self._lines.append(f"{indent}while {going} and {index} < {limit}:")
        self._block(body, inner)
        self._yield(body, [going, *names], list(body.outputs()), inner)
        self._lines.append(f"{inner}{index} += 1")
        if outputs:
            targets = [self._new(output) for output in outputs]
            self._lines.append(f"{indent}{_tuple(targets)} = {_tuple(names)}")
            held = [n for n, o in zip(names, outputs, strict=True) if o.type().kind() in _HELD]
            if held:
                self._lines.append(f"{indent}del {', '.join(held)}")

    def _yield(self, block: Any, targets: list[str], results: list[Any], indent: str) -> None:
        """Assign the results of a block, and delete their names inside the block."""
        if not targets:
            return
        values = [self._value(value) for value in results]
        self._lines.append(f"{indent}{_tuple(targets)} = {_tuple(values)}")
        own = {value.debugName() for node in block.nodes() for value in node.outputs()}
        held = [
            value
            for result, value in zip(results, values, strict=True)
            if result.debugName() in own and result.type().kind() in _HELD and value.startswith("v")
        ]
        if held:
            self._lines.append(f"{indent}del {', '.join(dict.fromkeys(held))}")

    def _refuse_growth(self, loop: Any) -> None:
        """Refuse a loop over a list that its body changes, whose length Python reads each time."""
        length = loop.inputsAt(0).node()
        lengths = [length] + [value.node() for value in length.inputs()]  # min of some, for zip
        lists = [n.inputsAt(0) for n in lengths if n.kind() == "aten::len"]
        for node in _nested(loop):
            is_write = writes(node) and node.inputsAt(0).type().kind() == "ListType"
            if is_write and any(
                self._aliases.may_contain_alias(node.inputsAt(0), iterated) for iterated in lists
            ):
                raise _refusal(node, "a list is changed while it is iterated over")

    # ------------------------------------------------------------------------------- expressions

    def _expression(self, node: Any) -> str:
        kind, inputs = node.kind(), list(node.inputs())
        if kind in self._functions:
            return self._call(self._functions[kind], inputs)
        if kind in _IDENTITIES:
            return self._value(inputs[0])
        if kind == "prim::ListConstruct":
            return f"[{', '.join(map(self._value, inputs))}]"
        if kind == "prim::TupleConstruct":
            class_ = named_tuple_class(node.output().type())
            return (
                _tuple(map(self._value, inputs)) if class_ is None else self._call(class_, inputs)
            )
        if kind == "prim::DictConstruct":
            values = list(map(self._value, inputs))
            pairs = zip(values[::2], values[1::2], strict=True)
            return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
        if kind == "prim::TupleSlice":
            return f"{self._value(inputs[0])}[{node.i('beg')}:{node.i('end')}]"
        if kind in ("aten::eq", "aten::ne") and any(map(_is_shape, inputs)):
            # TorchScript makes a list of the tuple that the shape is compared with.
            first, second = (f"tuple({self._value(value)})" for value in inputs)
            return f"({first} {'==' if kind == 'aten::eq' else '!='} {second})"
        if kind in _CODES:
            self._refuse_texts(node)
        if kind in _TEXTS and any(v.node().kind() in _CODES for v in inputs):
            raise _refusal(node, "a dtype is converted to text")
        return self._operator(node, kind, inputs)

    def _operator(self, node: Any, kind: str, inputs: list[Any]) -> str:
        try:
            meant = python_meaning(node)
        except LookupError as error:
            raise _refusal(node, str(error)) from error
        if meant is not None:
            return self._call(meant, inputs)
        values = list(map(self._value, inputs))
        if kind in _OF_TENSORS and inputs[0].type().kind() == "TensorType":
            return _OF_TENSORS[kind][len(values) - 1].format(*values)
        callee = find_operator(qualified_name(node)) if interprets(node) else None
        if isinstance(callee, DispatcherOperator):
            return self._dispatched(callee, inputs, values, node)
        if kind in _EXPRESSIONS:
            return _EXPRESSIONS[kind].format(*values)
        if kind == "aten::slice" and inputs[0].type().kind() != "TensorType":
            return f"{values[0]}[{':'.join(values[1:])}]"
        if callee is None:
            raise _refusal(node, f"{kind} has no equivalent in Python")
        return f"{self._object(callee)}([{', '.join(values)}])"

    def _call(self, function: Callable[..., Any], inputs: list[Any]) -> str:
        return f"{self._object(function)}({', '.join(map(self._value, inputs))})"

    def _dispatched(
        self, callee: DispatcherOperator, inputs: list[Any], values: list[str], node: Any
    ) -> str:
        given = []
        for parameter, value, text in zip(callee.parameters, inputs, values, strict=True):
            if parameter.table is not None:
                text = self._enumerated(parameter.table, value, text)
            if parameter.is_keyword_only:
                is_constant = value.node().kind() == "prim::Constant"
                if is_constant and value.toIValue() == parameter.default:
                    continue
                text = f"{parameter.name}={text}"
            given.append(text)
        call = f"{self._object(callee.operator)}({', '.join(given)})"
        is_code = [output.type().kind() for output in node.outputs()] == ["IntType"]
        return f"{self._object(code_of)}({call})" if is_code else call

    def _enumerated(self, table: Sequence[Any], value: Any, text: str) -> str:
        """Return source for a dtype, layout or memory format, a number to TorchScript."""
        if value.node().kind() == "prim::Constant":
            code = value.toIValue()
            return "None" if code is None else self._object(table[code])
        if table is not DTYPES:
            raise _refusal(value.node(), "a layout or memory format is computed")
        return f"{self._object(dtype_of)}({text})"

    def _refuse_texts(self, node: Any) -> None:
        for use in node.output().uses():
            if use.user.kind() in (*_TEXTS, "prim::ListConstruct", "prim::TupleConstruct"):
                raise _refusal(node, "a dtype is converted to text, or stored in a container")


def _is_shape(value: Any) -> bool:
    return value.node().kind() == "aten::size" and value.type().kind() == "ListType"


def _tuple(values: Any) -> str:
    return f"({''.join(f'{value}, ' for value in values)})".replace(", )", ",)")


def _nested(node: Any) -> list[Any]:
    found = []
    for block in node.blocks():
        for inner in block.nodes():
            found += [inner, *_nested(inner)]
    return found


def _reads(node: Any) -> set[str]:
    """Return the names that a node and the nodes of its blocks read."""
    names = {value.debugName() for value in node.inputs()}
    for block in node.blocks():
        names |= {value.debugName() for value in block.outputs()}
        for inner in block.nodes():
            names |= _reads(inner)
    return names


def _refusal(node: Any, why: str) -> CaptureError:
    return CaptureError(f"{why} ({where(node)})", _ANOTHER_WAY)
