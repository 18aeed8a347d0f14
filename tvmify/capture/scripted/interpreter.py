"""Run a TorchScript graph node by node, with Python values and tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tvmify.capture.scripted.meaning import python_meaning, torchscript_meaning
from tvmify.capture.scripted.named_tuples import named_tuple_class
from tvmify.capture.scripted.operators import find_operator, qualified_name
from tvmify.capture.state import ModulePath
from tvmify.capture.values import plain
from tvmify.errors import (
    CaptureError,
    DependsOnValues,
    NotCompiled,
    UnsupportedOperator,
    described,
)
from tvmify.torch_compat.symbols import SYMBOLS

#: In TorchScript, scalars have the types in the graph: 2 ** 3 is 8.0.
_SCALARS: dict[str, Callable[[Any], Any]] = {"FloatType": float, "IntType": int, "BoolType": bool}
#: Nodes that return their input.
IDENTITIES = frozenset(
    {"prim::unchecked_cast", "prim::unchecked_unwrap_optional", "aten::_unwrap_optional"}
)
#: Where PyTorch checks, for speed, whether a mask is causal. "No" is always right: attention then
#: uses the mask.
_HINT = re.compile(r"torch/nn/modules/transformer\.py:\d+: make_causal = bool\(")


class Interpreter:
    """Executes the inlined graph of a ScriptModule's or ScriptFunction's forward.

    All Python values (sizes, flags, dtypes, lists) are computed, so loops and branches on them do
    not appear in a program that is being recorded.

    Parameters
    ----------
    graph
        An inlined graph, which calls operators but no functions or methods.
    read
        Returns the value of the attribute with a dotted name; a `ModulePath` for a module.
    is_python
        Whether numbers and strings follow Python's rules, as in a plain module, rather than
        TorchScript's.
    """

    def __init__(
        self, graph: torch._C.Graph, read: Callable[[str], Any], is_python: bool = False
    ) -> None:
        self._graph = graph
        self._read = read
        self._is_python = is_python

    def run(self, inputs: Sequence[Any]) -> Any:
        """Return the result of the graph; ``inputs`` include the root as a `ModulePath`, if any.

        Raises
        ------
        CaptureError
            A branch, a loop or a number depends on the values of tensors.
        UnsupportedOperator
            An operator is unknown, or the program changes the module's state.
        """
        values = dict(zip((i.debugName() for i in self._graph.inputs()), inputs, strict=True))
        (result,) = self._run_block(self._graph, values)
        return plain(result)

    def _run_block(self, block: Any, values: dict[str, Any]) -> list[Any]:
        for node in block.nodes():
            self._run_node(node, values)
        return [values[output.debugName()] for output in block.outputs()]

    def _run_node(self, node: torch._C.Node, values: dict[str, Any]) -> None:
        kind = node.kind()
        inputs = [values[value.debugName()] for value in node.inputs()]
        if kind == "prim::If":
            branch = list(node.blocks())[0 if _truth(inputs[0], node) else 1]
            results = self._run_block(branch, values)
        elif kind == "prim::Loop":
            results = self._run_loop(node, inputs, values)
        elif kind in ("prim::TupleUnpack", "prim::ListUnpack"):
            results = list(inputs[0])
        elif kind == "prim::SetAttr":
            results = []  # of a tensor that was written in place; `fingerprint` refuses others
        elif kind in _STRUCTURE:
            results = [_STRUCTURE[kind](self, node, inputs)]
        elif kind in IDENTITIES:
            results = inputs[:1]
        elif kind == "aten::Bool" and _HINT.search(where(node)):
            results = [False]
        else:
            results = self._call(node, inputs)
        outputs = list(node.outputs())
        if len(results) != len(outputs):
            raise CaptureError(
                f"{kind} returned {len(results)} values where TorchScript expects {len(outputs)} "
                f"({where(node)})",
                "Pass lists of the length that the code unpacks.",
            )
        for output, result in zip(outputs, results, strict=True):
            values[output.debugName()] = result

    def _run_loop(
        self, node: torch._C.Node, inputs: list[Any], values: dict[str, Any]
    ) -> list[Any]:
        (body,) = node.blocks()
        names = [value.debugName() for value in body.inputs()]
        limit, condition, carried = inputs[0], inputs[1], inputs[2:]
        iteration = 0
        while iteration < limit and _truth(condition, node):
            values.update(zip(names, [iteration, *carried], strict=True))
            condition, *carried = self._run_block(body, values)
            iteration += 1
        return carried

    def _call(self, node: torch._C.Node, inputs: list[Any]) -> list[Any]:
        name = qualified_name(node)
        callee = find_operator(name)
        if callee is None:
            raise UnsupportedOperator([name], where(node))
        try:
            meant = self._meaning(node, inputs)
            result = callee(inputs) if meant is None else meant(*inputs)
        except CaptureError as error:
            raise type(error)(f"{error.reason} ({where(node)})", error.next_step) from error
        except NotCompiled:
            raise
        except Exception as error:
            raise CaptureError(
                f"{name} failed while the program was captured ({where(node)}): {described(error)}",
                "Run the module in eager PyTorch to see whether it fails there as well.",
            ) from error
        outputs = list(node.outputs())
        if not outputs:
            return []
        if len(outputs) > 1:
            return list(result)
        convert = None if self._is_python else _SCALARS.get(outputs[0].type().kind())
        if isinstance(result, (torch.SymInt, torch.SymFloat)) and convert is not bool:
            return [torch.sym_float(result) if convert is float else result]  # still symbolic
        return [result if convert is None else convert(result)]

    def _meaning(self, node: torch._C.Node, inputs: list[Any]) -> Callable[..., Any] | None:
        if self._is_python:
            return python_meaning(node)
        if any(isinstance(value, SYMBOLS) for value in inputs):
            return None  # TorchScript's own operators make numbers of symbols
        return torchscript_meaning(node)

    def _attribute(self, node: torch._C.Node, inputs: list[Any]) -> Any:
        (owner,) = inputs
        if not isinstance(owner, ModulePath):
            raise UnsupportedOperator([node.kind()], f"an attribute of an object ({where(node)})")
        return self._read(owner.attribute(node.s("name")))

    def _tuple(self, node: torch._C.Node, inputs: list[Any]) -> Any:
        (output,) = node.outputs()
        kind = named_tuple_class(output.type())
        return tuple(inputs) if kind is None else kind(*inputs)


def where(node: torch._C.Node) -> str:
    """Return the line of Python that a node comes from: ``net.py:12: y = x[n]``."""
    return source_line(str(node.sourceRange())) or "no source known"


def source_line(text: str) -> str:
    """Extract file, line number and line from TorchScript's text of a source range, if any."""
    file, line = "", ""
    rows = text.splitlines()
    for row, following in itertools.pairwise([*rows, ""]):
        if row.lstrip().startswith("File "):
            file = row.strip().removeprefix("File ").replace('"', "").replace(", line ", ":")
        if following.rstrip().endswith("<--- HERE"):
            line = row.strip()
            break
    return ": ".join(part for part in (file, line) if part)


def _truth(condition: Any, node: torch._C.Node) -> bool:
    if isinstance(condition, (bool, int, torch.SymBool, torch.SymInt)):
        return bool(condition)
    raise DependsOnValues(
        f"a branch depends on the values of tensors ({where(node)})",
        "Write it with torch.where, or decorate the submodules around it.",
    )


def _constant(_: Interpreter, node: torch._C.Node, __: list[Any]) -> Any:
    (output,) = node.outputs()
    return output.toIValue()


def _raise(_: Interpreter, node: torch._C.Node, inputs: list[Any]) -> Any:
    raise CaptureError(
        f"the module raises an exception for these inputs: {inputs[0]} ({where(node)})",
        "Call it in eager PyTorch to see the exception itself.",
    )


def _dictionary(_: Interpreter, __: torch._C.Node, inputs: list[Any]) -> Any:
    return dict(zip(inputs[::2], inputs[1::2], strict=True))


_STRUCTURE: dict[str, Callable[[Interpreter, torch._C.Node, list[Any]], Any]] = {
    "prim::Constant": _constant,
    "prim::GetAttr": Interpreter._attribute,
    "prim::ListConstruct": lambda _, __, inputs: list(inputs),
    "prim::TupleConstruct": Interpreter._tuple,
    "prim::DictConstruct": _dictionary,
    "prim::TupleIndex": lambda _, __, inputs: inputs[0][inputs[1]],
    "prim::TupleSlice": lambda _, node, inputs: inputs[0][node.i("beg") : node.i("end")],
    "prim::NumToTensor": lambda _, __, inputs: _number_tensor(inputs[0]),
    "prim::IfThenElse": lambda _, node, inputs: inputs[1 if _truth(inputs[0], node) else 2],
    "prim::Uninitialized": lambda _, __, ___: None,
    "prim::RaiseException": _raise,
}


def interprets(node: torch._C.Node) -> bool:
    """Whether the interpreter can run a node."""
    kind = node.kind()
    known = kind in _STRUCTURE or kind in IDENTITIES
    flow = kind in ("prim::If", "prim::Loop", "prim::TupleUnpack", "prim::ListUnpack")
    return known or flow or find_operator(qualified_name(node)) is not None


def _number_tensor(number: Any) -> torch.Tensor:
    """Make the tensor of a traced size a literal, so that values computed from it are known."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.tensor(number)
