"""Canonical text of a program recorded by ``torch.export``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from tvmify.artifact.recorded_shapes import assumptions
from tvmify.capture.scripted.fingerprint import tensor_digest
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Texts(dict[Any, str]):
    """The text of each node."""

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count()

    def number(self, node: Any) -> None:
        """Give a node the next number."""
        self[node] = f"%{next(self._count)}"


def fingerprint(program: ExportedProgram, weights: Collection[str]) -> str:
    """Return the canonical text of an exported program.

    Parameters
    ----------
    weights
        Names of the tensors that the program reads.

    Raises
    ------
    UnsupportedOperator
        The graph holds an object of unknown content.
    """
    lines = [f"arguments {_structure(program.call_spec.in_spec)}"]
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    texts = _Texts()
    literals: dict[Any, Any] = program.constants
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = inputs[node.name]
            if spec.target in literals:
                texts[node] = tensor_digest(literals[spec.target])
            elif spec.target is not None:
                texts[node] = f"weight({spec.target})"
            else:
                texts.number(node)
                lines.append(f"argument {texts[node]} {_value(node.meta.get('val'))}")
    _graph(program.graph_module, texts, lines, "")
    lines.append(f"results {_structure(program.call_spec.out_spec)}")
    lines += (f"assumes {each}" for each in assumptions(program))
    seen: dict[int, str] = {}
    for name in weights:
        tensor = program.state_dict[name]
        same = seen.setdefault(tensor.data_ptr() or id(tensor), name)
        lines.append(f"weight {name}" + ("" if same == name else f" is {same}"))
    return "\n".join(lines)


def operators_of(program: ExportedProgram) -> set[str]:
    """Return the operators of an exported program without their overloads, e.g. ``aten::add``."""
    parts = (part for part in program.graph_module.modules() if isinstance(part, GraphModule))
    nodes: list[Any] = [node for part in parts for node in part.graph.nodes]
    return {
        node.target._schema.name
        for node in nodes
        if node.op == "call_function" and hasattr(node.target, "_schema")
    }


def _graph(module: torch.nn.Module, texts: _Texts, lines: list[str], indent: str) -> None:
    graph: Any = module.graph
    for node in graph.nodes:
        if node.op == "placeholder":
            if node not in texts:
                texts.number(node)
                lines.append(f"{indent}argument {texts[node]}")
        elif node.op == "get_attr":
            child = getattr(module, node.target)
            texts.number(node)
            if isinstance(child, torch.Tensor):
                lines.append(f"{indent}{texts[node]} = {tensor_digest(child)}")
            else:
                lines.append(f"{indent}{texts[node]} = subgraph")
                _graph(child, texts, lines, indent + "  ")
        elif node.op == "output":
            lines.append(f"{indent}return {_text(node.args, texts)}")
        else:
            operands = [_text(argument, texts) for argument in node.args]
            operands += [f"{key}={_text(value, texts)}" for key, value in node.kwargs.items()]
            texts.number(node)
            lines.append(f"{indent}{texts[node]} = {_target(node.target)}({', '.join(operands)})")


def _target(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def _text(value: Any, texts: _Texts) -> str:
    if isinstance(value, torch.fx.Node):
        return texts[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, texts) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item, texts)}' for key, item in value.items())}}}"
    return _value(value)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    text = repr(value)
    if _ADDRESS.search(text):
        raise UnsupportedOperator([type(value).__qualname__], "an object inside the program")
    return text


def _structure(spec: Any) -> str:
    return _ADDRESS.sub("", " ".join(str(spec).split()))
