"""Canonical text of a TorchScript program: equal texts mean equal programs, in any process.

One line for each operation, with its operands written into it: values by number in order of their
definition, constants and plain attributes by value, weights by name. What says nothing about the
result (source lines, mangled class names, the names of values, where constants stand, branches
that an attribute rules out) does not appear.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch

from tvmify.capture.interpreter import interprets, where
from tvmify.capture.named_tuples import demangled, field_names
from tvmify.capture.operators import qualified_name
from tvmify.capture.state import ModulePath, State, WeightName
from tvmify.errors import CaptureError, UnsupportedOperator

_UNKNOWN = object()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and sha256 of a tensor's elements.

    Raises
    ------
    CaptureError
        The tensor is not a plain strided one.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CaptureError(
            f"The program holds a constant tensor of layout {tensor.layout}, dtype {tensor.dtype} "
            f"on {tensor.device}",
            "Keep it as a dense tensor, or decorate the submodules around it.",
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # ctypes and not NumPy: it has no bfloat16, and need not be there
    count = plain.numel() * plain.element_size()
    elements = (ctypes.c_char * count).from_address(plain.data_ptr()) if count else b""
    dtype = str(plain.dtype).removeprefix("torch.")
    shape = ", ".join(map(str, plain.shape))
    return f"tensor({dtype}, [{shape}], sha256 {hashlib.sha256(elements).hexdigest()})"


def literal_text(value: Any) -> str:
    """Return canonical text of a constant or of an attribute's value.

    Raises
    ------
    UnsupportedOperator
        The value is an object whose content is unknown.
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


def type_text(type_: torch._C.Type) -> str:
    """Return the canonical name of a TorchScript type."""
    fields = field_names(type_)
    name = demangled(type_.annotation_str)
    return name if fields is None else f"{name}({', '.join(fields)})"


def fingerprint(graph: torch._C.Graph, schema: torch._C.FunctionSchema, state: State) -> str:
    """Return the canonical text of an inlined graph, and fill ``state`` with what it reads.

    Parameters
    ----------
    graph
        The inlined graph of forward.
    schema
        Of the same forward: names and defaults of the arguments.
    state
        Its root is the module; an empty one for a function.

    Raises
    ------
    UnsupportedOperator
        The graph has operators or effects which the interpreter does not know, in a branch that
        could be taken.
    """
    return _Walk(state).describe(graph, schema)


class _Walk:
    """One pass over a graph: ``_texts`` names every value, ``_known`` has those that are known."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._texts: dict[str, str] = {}
        self._known: dict[str, Any] = {}
        self._lines: list[str] = []
        self._count = 0

    def describe(self, graph: torch._C.Graph, schema: torch._C.FunctionSchema) -> str:
        for value, argument in zip(graph.inputs(), schema.arguments, strict=True):
            if self._state.root is not None and value is next(iter(graph.inputs())):
                pass
            if argument.name == "self" or self._is_root(value, graph):
                self._know(value, ModulePath(""), "module()")
                continue
            default = ""
            if argument.has_default_value():
                default = f" = {literal_text(argument.default_value)}"
            number = self._number(value)
            kind = type_text(argument.type)
            keyword = "*, " if argument.kwarg_only else ""
            self._lines.append(f"argument {number} {keyword}{argument.name}: {kind}{default}")
        self._block(graph, "")
        (result,) = graph.outputs()
        self._lines.append(f"return {self._text(result)}")
        return "\n".join([*self._lines, *self._weights()])
