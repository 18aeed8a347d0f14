"""Canonical text of a TorchScript program: equal texts mean equal programs, in any process.

One line per operation, with its operands: values by number in the order of their definition,
constants and plain attributes by value, weights by name. What cannot change the result is left out:
source lines, mangled class names, names of values, positions of constants, and branches that an
attribute rules out.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
from typing import Any, NamedTuple

import torch

from tvmify.capture.scripted.interpreter import interprets, where
from tvmify.capture.scripted.meaning import meaning_text, python_meaning, torchscript_meaning
from tvmify.capture.scripted.named_tuples import demangled, field_names
from tvmify.capture.scripted.operators import qualified_name
from tvmify.capture.state import ModulePath, State, WeightName
from tvmify.errors import CaptureError, UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name
from tvmify.torch_compat.memory import has_memory

_UNKNOWN = object()
#: Types that may decide a condition; a comparison of tensors is an ordinary operation.
_PLAIN = (bool, int, float, str, type(None))


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and sha256 of a tensor's elements.

    Raises
    ------
    CaptureError
        The tensor is not a plain strided one, or has no memory.
    """
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    if not (is_strided and has_memory(tensor)):
        raise CaptureError(
            f"the program holds a constant tensor of layout {tensor.layout}, dtype {tensor.dtype} "
            f"on {tensor.device}" + (", which has no memory" if is_strided else ""),
            "Keep it as a dense tensor, or decorate the submodules around it.",
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # not NumPy, which lacks bfloat16 and may not be installed
    count = plain.numel() * plain.element_size()
    elements = (ctypes.c_char * count).from_address(plain.data_ptr()) if count else b""
    dtype = dtype_name(plain.dtype)
    shape = ", ".join(map(str, plain.shape))
    return f"tensor({dtype}, [{shape}], sha256 {hashlib.sha256(elements).hexdigest()})"


def literal_text(value: Any) -> str:
    """Return the canonical text of a constant or of an attribute's value.

    Raises
    ------
    UnsupportedOperator
        The value is an object of unknown content.
    """
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, WeightName):
        return f"weight({value.name})"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal_text, value))})"
    if isinstance(value, dict):
        items = (f"{literal_text(key)}: {literal_text(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    raise UnsupportedOperator(
        ["prim::Constant"], f"the program holds an object of type {type(value).__qualname__}"
    )


def type_text(type_: torch._C.JitType) -> str:
    """Return the canonical name of a TorchScript type."""
    fields = field_names(type_)
    name = demangled(type_.annotation_str)
    return name if fields is None else f"{name}({', '.join(fields)})"


class Description(NamedTuple):
    """What a graph computes.

    Attributes
    ----------
    fingerprint
        Its canonical text.
    operators
        The operators in it without their overloads, e.g. ``aten::add``.
    """

    fingerprint: str
    operators: frozenset[str]


def describe(
    graph: torch._C.Graph,
    schema: torch._C.FunctionSchema,
    state: State,
    is_python: bool = False,
) -> Description:
    """Describe an inlined graph, and record in ``state`` what it reads.

    Parameters
    ----------
    graph
        The inlined graph of forward.
    schema
        The schema of the same forward, for the names and defaults of its arguments.
    state
        Its root is the module; empty for a function.
    is_python
        Whether numbers and strings follow Python's rules rather than TorchScript's.

    Raises
    ------
    UnsupportedOperator
        A branch that may be taken has operators or effects that the interpreter does not know.
    """
    return _Walk(state, is_python).describe(graph, schema)


class _Walk:
    """One pass over a graph.

    ``_texts`` has the text of each value; ``_known`` has the values of constants and plain
    attributes, and of conditions on them.
    """

    def __init__(self, state: State, is_python: bool) -> None:
        self._state = state
        self._is_python = is_python
        self._texts: dict[str, str] = {}
        self._known: dict[str, Any] = {}
        self._lines: list[str] = []
        self._unsupported: list[tuple[str, str]] = []
        self._operators: set[str] = set()
        self._count = 0

    def describe(self, graph: torch._C.Graph, schema: torch._C.FunctionSchema) -> Description:
        inputs = list(graph.inputs())
        arguments = list(schema.arguments)
        if self._state.root is not None:
            self._known[inputs.pop(0).debugName()] = ModulePath("")
            arguments = arguments[1:]
        for value, argument in zip(inputs, arguments, strict=True):
            number = self._number(value)
            keyword = "*, " if argument.kwarg_only else ""
            line = f"argument {number} {keyword}{argument.name}: {type_text(argument.type)}"
            if argument.has_default_value():
                line += f" = {literal_text(argument.default_value)}"
            self._lines.append(line)
        results = self._block(graph, "")
        self._lines.append(f"return {results}")
        if self._unsupported:
            names, places = zip(*self._unsupported, strict=True)
            raise UnsupportedOperator(names, places[0])
        text = "\n".join([*self._lines, *self._weights()])
        return Description(text, frozenset(self._operators))

    def _weights(self) -> list[str]:
        """Name the tensors; that two names are one tensor is part of the program."""
        first: dict[int, str] = {}
        lines = []
        for name, tensor in self._state.tensors.items():
            same = first.setdefault(id(tensor), name)
            lines.append(f"weight {name}" + ("" if same == name else f" is {same}"))
        return lines

    def _block(self, block: Any, indent: str) -> str:
        for node in block.nodes():
            self._node(node, indent)
        return ", ".join(self._text(value) for value in block.outputs())

    def _node(self, node: torch._C.Node, indent: str) -> None:
        known = [self._known.get(value.debugName(), _UNKNOWN) for value in node.inputs()]
        if self._evaluate(node, known, indent):
            return
        if interprets(node):
            self._operation(node, known, indent)
            return
        place = where(node)
        if node.kind() == "prim::SetAttr" and isinstance(known[0], ModulePath):
            place = f"forward sets the attribute {known[0].attribute(node.s('name'))}"
        self._unsupported.append((qualified_name(node), place))

    def _evaluate(self, node: torch._C.Node, known: list[Any], indent: str) -> bool:
        """Evaluate a node, if constants and attributes suffice for that; return whether they do."""
        kind = node.kind()
        outputs = list(node.outputs())
        if kind == "prim::Constant":
            if outputs[0].type().kind() != "FunctionType":  # of calls that have been inlined
                self._known[outputs[0].debugName()] = outputs[0].toIValue()
        elif kind == "prim::GetAttr" and isinstance(known[0], ModulePath):
            path = known[0].attribute(node.s("name"))
            self._known[outputs[0].debugName()] = value = self._state.find(path)
            if not isinstance(value, (ModulePath, WeightName)):
                self._texts[outputs[0].debugName()] = f"{path}={literal_text(value)}"
        elif kind in _CONDITIONS and all(isinstance(value, _PLAIN) for value in known):
            self._known[outputs[0].debugName()] = _CONDITIONS[kind](*known)
        elif kind in ("aten::__is__", "aten::__isnot__") and _is_weight_and_none(known):
            self._known[outputs[0].debugName()] = kind == "aten::__isnot__"
        elif kind == "prim::If" and isinstance(known[0], bool):
            self._taken(list(node.blocks())[0 if known[0] else 1], outputs, indent)
        else:
            return kind == "prim::SetAttr" and _is_written_in_place(node, known)
        return True

    def _operation(self, node: torch._C.Node, known: list[Any], indent: str) -> None:
        """Describe a node, and the blocks in it."""
        outputs = list(node.outputs())
        self._operators.add(node.kind())
        operation = qualified_name(node) + self._rules(node)
        operands = ", ".join(self._text(value) for value in node.inputs())
        extra = "".join(f" {name}={_node_attribute(node, name)}" for name in node.attributeNames())
        position = len(self._lines)
        self._lines.append("")
        for block in node.blocks():
            parameters = ", ".join(self._number(value) for value in block.inputs())
            self._lines.append(f"{indent}  block({parameters})")
            results = self._block(block, indent + "    ")
            self._lines.append(f"{indent}    yield {results}")
        results = ", ".join(f"{self._number(o)}: {type_text(o.type())}" for o in outputs)
        self._lines[position] = f"{indent}{results} = {operation}({operands}){extra}"
        if _is_in_place(node.kind()) and isinstance(known[0], WeightName):
            self._known[outputs[0].debugName()] = known[0]  # itself, written to

    def _rules(self, node: torch._C.Node) -> str:
        """Say whether a node follows Python's rules, if its name does not tell."""
        if not self._is_python:
            return " by TorchScript" if torchscript_meaning(node) is not None else ""
        try:
            meant = python_meaning(node)
        except LookupError as error:
            raise UnsupportedOperator([node.kind()], f"{error} ({where(node)})") from error
        return "" if meant is None else f" as {meaning_text(meant)}"

    def _taken(self, block: Any, outputs: list[Any], indent: str) -> None:
        """Describe the branch that an attribute selects, without the condition."""
        for node in block.nodes():
            self._node(node, indent)
        for inner, outer in zip(block.outputs(), outputs, strict=True):
            for table in (self._known, self._texts):
                if inner.debugName() in table:
                    table[outer.debugName()] = table[inner.debugName()]

    def _number(self, value: Any) -> str:
        self._count += 1
        text = self._texts[value.debugName()] = f"%{self._count - 1}"
        return text

    def _text(self, value: Any) -> str:
        name = value.debugName()
        if name not in self._texts:
            # a value that is never defined (after an unsupported operator) has no text
            self._texts[name] = literal_text(self._known.get(name, "?"))
        return self._texts[name]


#: Conditions on attributes (``training``, a bias that is None, a mode) are evaluated immediately.
_CONDITIONS = {
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "prim::unchecked_cast": lambda value: value,
}


def _is_in_place(kind: str) -> bool:
    return kind.endswith("_") and not kind.endswith("__")


def _is_weight_and_none(known: list[Any]) -> bool:
    return isinstance(known[0], WeightName) and known[1] is None


def _is_written_in_place(node: torch._C.Node, known: list[Any]) -> bool:
    """Whether a node is like ``self.calls += 1``: the attribute stays the same tensor."""
    owner, value = known
    if not isinstance(owner, ModulePath) or not isinstance(value, WeightName):
        return False
    return value.name == owner.attribute(node.s("name"))


def _node_attribute(node: torch._C.Node, name: str) -> str:
    kind = node.kindOf(name)
    if kind not in ("i", "f", "s", "is", "fs", "ss"):
        raise UnsupportedOperator([node.kind()], f"its attribute {name} ({where(node)})")
    return literal_text(getattr(node, kind)(name))
