"""Nodes of a TorchScript graph as Python expressions.

Operators on numbers, strings and containers are Python's own, those on tensors call the dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tvmify.capture.scripted.interpreter import IDENTITIES, interprets, where
from tvmify.capture.scripted.meaning import python_meaning
from tvmify.capture.scripted.named_tuples import named_tuple_class
from tvmify.capture.scripted.operators import DispatcherOperator, find_operator, qualified_name
from tvmify.capture.values import DTYPES, code_of, dtype_of
from tvmify.errors import CaptureError

#: What a user can do about code that cannot be written in Python.
ANOTHER_WAY = "Rewrite it, or decorate the submodules around it."

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
#: Nodes that return a dtype or layout as a number.
_CODES = ("prim::dtype", "prim::layout")
_TEXTS = ("aten::str", "aten::format", "aten::percentFormat")


class Expressions:
    """Writes the values of a graph as Python expressions.

    Parameters
    ----------
    functions
        Functions for our own kinds of nodes.

    Attributes
    ----------
    variables
        The Python variable of each value that has one, by TorchScript's name.
    namespace
        The objects that expressions refer to, by name.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.variables: dict[str, str] = {}
        self.namespace: dict[str, Any] = {}
        self._functions = functions
        self._constants: dict[str, str] = {}
        self._objects: dict[int, str] = {}

    def new_variable(self, value: Any) -> str:
        """Return the name of a new variable for a value."""
        variable = self.variables[value.debugName()] = f"v{len(self.variables)}"
        return variable

    def define_constant(self, output: Any) -> None:
        """Take the result of a ``prim::Constant``."""
        if output.type().kind() == "FunctionType":
            return  # of a call that has been inlined
        value = output.toIValue()
        is_finite = type(value) is not float or math.isfinite(value)
        if (value is None or type(value) in (bool, int, float, str)) and is_finite:
            text = repr(value)
            text = f"({text})" if text.startswith("-") else text
        else:
            text = self._object(value)
        self._constants[output.debugName()] = text

    def value(self, value: Any) -> str:
        """Return the variable of a value, or the source of a constant.

        Raises
        ------
        CaptureError
            It is a module, or another object that has no variable.
        """
        name = value.debugName()
        text = self.variables.get(name) or self._constants.get(name)
        if text is None:
            raise refusal(value.node(), "a module or another object is passed to a function")
        return text

    def _object(self, value: Any) -> str:
        name = self._objects.setdefault(id(value), f"o{len(self._objects)}")
        self.namespace[name] = value  # which keeps the id its own
        return name

    def of(self, node: Any) -> str:
        """Return what a node computes.

        Raises
        ------
        CaptureError
            It has no equivalent in Python.
        """
        kind, inputs = node.kind(), list(node.inputs())
        if kind in self._functions:
            return self._call(self._functions[kind], inputs)
        if kind in IDENTITIES:
            return self.value(inputs[0])
        if kind == "prim::ListConstruct":
            return f"[{', '.join(map(self.value, inputs))}]"
        if kind == "prim::TupleConstruct":
            class_ = named_tuple_class(node.output().type())
            is_plain = class_ is None
            return tuple_of(map(self.value, inputs)) if is_plain else self._call(class_, inputs)
        if kind == "prim::DictConstruct":
            values = list(map(self.value, inputs))
            pairs = zip(values[::2], values[1::2], strict=True)
            return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
        if kind == "prim::TupleSlice":
            return f"{self.value(inputs[0])}[{node.i('beg')}:{node.i('end')}]"
        if kind in ("aten::eq", "aten::ne") and any(map(_is_shape, inputs)):
            # TorchScript makes a list of the tuple that the shape is compared with.
            first, second = (f"tuple({self.value(value)})" for value in inputs)
            return f"({first} {'==' if kind == 'aten::eq' else '!='} {second})"
        if kind in _CODES:
            self._refuse_texts(node)
        if kind in _TEXTS and any(v.node().kind() in _CODES for v in inputs):
            raise refusal(node, "a dtype is converted to text")
        return self._operator(node, kind, inputs)

    def _operator(self, node: Any, kind: str, inputs: list[Any]) -> str:
        try:
            meant = python_meaning(node)
        except LookupError as error:
            raise refusal(node, str(error)) from error
        if meant is not None:
            return self._call(meant, inputs)
        values = list(map(self.value, inputs))
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
            raise refusal(node, f"{kind} has no equivalent in Python")
        return f"{self._object(callee)}([{', '.join(values)}])"

    def _call(self, function: Callable[..., Any], inputs: list[Any]) -> str:
        return f"{self._object(function)}({', '.join(map(self.value, inputs))})"

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
            raise refusal(value.node(), "a layout or memory format is computed")
        return f"{self._object(dtype_of)}({text})"

    def _refuse_texts(self, node: Any) -> None:
        for use in node.output().uses():
            if use.user.kind() in (*_TEXTS, "prim::ListConstruct", "prim::TupleConstruct"):
                raise refusal(node, "a dtype is converted to text, or stored in a container")


def _is_shape(value: Any) -> bool:
    return value.node().kind() == "aten::size" and value.type().kind() == "ListType"


def tuple_of(texts: Iterable[str]) -> str:
    """Return the source of a tuple."""
    return f"({''.join(f'{text}, ' for text in texts)})".replace(", )", ",)")


def refusal(node: Any, why: str) -> CaptureError:
    """Return the reason why a node cannot be written in Python."""
    return CaptureError(f"{why} ({where(node)})", ANOTHER_WAY)
