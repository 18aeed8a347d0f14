"""Which Python function a TorchScript operator on numbers or strings was compiled from. TorchScript
has one operator where Python has two (``aten::pow`` is ``**`` and ``math.pow``), and some of its
defaults differ. The source line of a node shows which one it was.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.capture.questions import Reached
from tvmify.capture.scripted.primitives import PRIMITIVES

#: Methods of strings with defaults, and the number of arguments without one.
_WITH_DEFAULTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    **dict.fromkeys(("aten::find", "aten::rfind", "aten::index", "aten::count"), (1, (0, -1))),
    **dict.fromkeys(("aten::startswith", "aten::endswith"), (1, (0, -1))),
    **dict.fromkeys(("aten::strip", "aten::lstrip", "aten::rstrip"), (0, (" \n\t\f\v",))),
    "aten::rsplit": (0, (" ", -1)),
}

_SCALARS = ("IntType", "FloatType", "BoolType")
_TEXTS = ("aten::format", "aten::percentFormat", "aten::str")
#: Operators that crash the process where Python raises an error.
_TRAPPING = (
    "aten::remainder",
    "aten::floordiv",
    "aten::divmod",
    "aten::__round_to_zero_floordiv",
)
#: Conversions that TorchScript may also insert, such as ``x.item()`` to an int where a bool is
#: needed.
_CONVERSIONS = {"aten::Int": "int", "aten::Float": "float"}
#: Builtin functions that go through the rows of a tensor, or take no tensor. TorchScript makes
#: numbers of the arguments of the others, which is noticed.
_BUILTINS = frozenset("all any round sum".split())
#: More than the number that TorchScript has for any dtype.
_DTYPES = 64


def python_meaning(node: torch._C.Node) -> Callable[..., Any] | None:
    """Return the Python function that a node calls, if its kind does not determine it.

    Raises
    ------
    LookupError
        The source does not tell either.
    """
    kind = node.kind()
    inputs = list(node.inputs())
    if kind == "aten::pow" and not any(v.type().kind() == "TensorType" for v in inputs):
        return _power(node)
    if kind in _CONVERSIONS and inputs[0].type().kind() != "TensorType":
        is_explicit = _highlighted(str(node.sourceRange())).startswith(_CONVERSIONS[kind])
        return None if is_explicit else _unchanged
    if kind in _WITH_DEFAULTS and inputs[0].type().kind() == "StringType":
        return _method(node, inputs)
    return None


def _unchanged(value: Any) -> Any:
    return value


def torchscript_meaning(node: torch._C.Node) -> Callable[..., Any] | None:
    """Return TorchScript's own operator on numbers; None for any other node."""
    if node.kind() in _TEXTS:
        return functools.partial(_written, node.kind())
    values = [*node.inputs(), *node.outputs()]
    if not values or any(value.type().kind() not in _SCALARS for value in values):
        return None
    name = node.schema().partition("(")[0] or node.kind()
    kind, _, overload = name.partition(".")
    namespace, _, operator_ = kind.partition("::")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), operator_), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return _checked(found) if kind in _TRAPPING else found


def _written(kind: str, *values: Any) -> str:
    if any(isinstance(leaf, (float, torch.Tensor)) for leaf in pytree.tree_leaves(values)):
        raise ValueError("TorchScript formats floats differently than Python")
    return str(PRIMITIVES[kind](*values))


def _checked(divide: Callable[..., Any]) -> Callable[..., Any]:
    def divided(left: Any, right: Any) -> Any:
        if isinstance(right, int) and right in (0, -1):
            raise ZeroDivisionError("TorchScript may crash the process here")
        return divide(left, right)

    return divided


def _power(node: torch._C.Node) -> Callable[..., Any]:
    text = _highlighted(str(node.sourceRange()))
    if text.endswith(".pow"):
        return math.pow
    if "**" in text or text == "pow":
        return operator.pow
    raise LookupError(f"whether it is ** or math.pow: {text!r}")


def _method(node: torch._C.Node, inputs: list[Any]) -> Callable[..., Any]:
    required, defaults = _WITH_DEFAULTS[node.kind()]
    count = len(inputs) - 1
    for value, default in reversed(list(zip(inputs[1 + required :], defaults, strict=False))):
        if value.node().kind() != "prim::Constant" or value.toIValue() != default:
            break
        count -= 1
    return _Method(node.kind().removeprefix("aten::"), count)


class _Method(NamedTuple):
    """A method of strings, and the number of arguments in a call of it."""

    name: str
    count: int

    def __call__(self, text: str, *args: Any) -> Any:
        return getattr(text, self.name)(*args[: self.count])


def updates_dicts(scripted: Any) -> bool:
    """Whether a scripted module or function has statements such as ``d[key] += x`` on a dict of
    tensors, which TorchScript does not do in place.
    """
    graph = getattr(scripted, "forward", scripted).inlined_graph
    for store in graph.findAllNodes("aten::_set_item"):
        container, _, value = store.inputs()
        if container.type().kind() != "DictType" or value.type().kind() != "TensorType":
            continue
        read = next(iter(value.node().inputs()), value).node()
        if read.kind() == "aten::__getitem__" and read.sourceRange() == store.sourceRange():
            return True
    return False


def misread_function(scripted: Any, functions: Iterable[Reached]) -> str | None:
    """Return a function of Python that is given a tensor, or None. ``math.log`` makes a number of
    it, and ``sum`` adds its rows; TorchScript has operators of these names.
    """
    spellings: set[str] = set()
    for function, code, values in functions:
        spellings |= (_BUILTINS & code.names) - function.__globals__.keys()
        owners = [name for name, value in values if value is math]
        for name, value in values:
            if isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
                spellings |= {name, *(f"{owner}.{name}" for owner in owners)}
    if not spellings:
        return None
    graph = getattr(scripted, "forward", scripted).inlined_graph
    for name in {spelling.rpartition(".")[2] for spelling in spellings}:
        for node in graph.findAllNodes(f"aten::{name}"):
            takes_tensor = any(value.type().kind() == "TensorType" for value in node.inputs())
            if takes_tensor and (spelled := _highlighted(str(node.sourceRange()))) in spellings:
                return spelled
    return None


def misread_dtype(scripted: Any) -> str | None:
    """Return the text of an ``x.view(dtype)``, or None. To TorchScript a dtype is an integer, which
    it takes for a size; so a single size that may have been a dtype is returned, too.
    """
    graph = getattr(scripted, "forward", scripted).inlined_graph
    for node in graph.findAllNodes("aten::view"):
        sizes = list(list(node.inputs())[1].node().inputs())
        if len(sizes) != 1:
            continue
        source = sizes[0].node()
        is_constant = source.kind() == "prim::Constant"
        if source.kind() in ("prim::dtype", "prim::GetAttr") or (
            is_constant and 0 <= sizes[0].toIValue() < _DTYPES
        ):
            return _highlighted(str(node.sourceRange())) or "view"
    return None


def meaning_text(meant: Callable[..., Any]) -> str:
    """Return canonical text of a result of `python_meaning`."""
    if isinstance(meant, _Method):
        return f"{meant.name} of {meant.count}"
    return f"{meant.__module__}.{meant.__qualname__}"


def _highlighted(text: str) -> str:
    """Return the text that TorchScript underlines in its description of a source range."""
    rows = text.splitlines()
    for row, marks in itertools.pairwise(rows):
        if marks.rstrip().endswith("~ <--- HERE"):
            return row[marks.index("~") : marks.rindex("~") + 1]
    return ""
