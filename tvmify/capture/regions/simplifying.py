"""Simplifies a TorchScript graph before the search for regions."""

from __future__ import annotations

from typing import Any

import torch

from tvmify.capture.regions.finding import with_nested
from tvmify.capture.scripted.effects import is_tensor, writes
from tvmify.errors import CaptureError

#: Operators that return their input outside training; their schemas do not say so.
_DROPOUTS = tuple(
    f"aten::{name}{suffix}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
)
#: Operators that may return their input or a view of it; their schemas do not say so.
_HIDDEN_VIEWS = (
    "aten::atleast_1d aten::atleast_2d aten::atleast_3d aten::broadcast_tensors aten::meshgrid "
    "aten::cartesian_prod aten::einsum aten::type_as aten::unsafe_chunk aten::unsafe_split "
    "aten::unsafe_split_with_sizes aten::conj_physical aten::rrelu"
).split()


def simplify(graph: Any, root: Any) -> None:
    """Remove what obscures data flow: tuples, inactive dropouts, and writes without other readers.

    Parameters
    ----------
    graph
        An inlined graph; changed in place.
    root
        TorchScript's C++ module, whose attributes are read; None for a function.

    Raises
    ------
    CaptureError
        TorchScript cannot tell which tensors share written memory, or autocast is turned on inside.
    """
    _see_through_tuples(graph)
    _remove_dropouts(graph, root)
    torch._C._jit_pass_dce(graph)
    if any(graph.findNode(kind, True) for kind in _HIDDEN_VIEWS) and _writes_tensors(graph):
        raise CaptureError(
            "tensors are written in place, and some may be views, unknown to TorchScript",
            "Write it without in-place operators.",
        )
    torch._C._jit_pass_remove_mutation(graph)
    for node in graph.findAllNodes("prim::Enter", True):
        if "autocast" in node.input().type().annotation_str:
            raise CaptureError("forward turns autocast on", "Convert the module with .to().")


def _see_through_tuples(graph: Any) -> None:
    """Replace tuples that are only packed and unpacked by their elements."""
    for kind in ("prim::TupleUnpack", "prim::TupleIndex"):
        for node in graph.findAllNodes(kind, True):
            packed = node.inputsAt(0).node()
            if packed.kind() != "prim::TupleConstruct":
                continue
            elements = list(packed.inputs())
            if kind == "prim::TupleIndex":
                index = node.inputsAt(1).toIValue()
                elements = [] if index is None else [elements[index]]
            for value, element in zip(node.outputs(), elements, strict=False):
                value.replaceAllUsesWith(element)


def _remove_dropouts(graph: Any, root: Any) -> None:
    for kind in _DROPOUTS:
        for node in graph.findAllNodes(kind, True):
            if _known(node.inputsAt(2), root) is False:
                node.output().replaceAllUsesWith(node.inputsAt(0))
                node.destroy()


def _known(value: Any, root: Any) -> Any:
    """Return the value of a constant or an attribute, or None if it is unknown."""
    node = value.node()
    if node.kind() == "prim::Constant":
        return value.toIValue()
    if node.kind() == "prim::Param":
        return root if value.offset() == 0 else None
    if node.kind() != "prim::GetAttr":
        return None
    owner = _known(node.input(), root)
    if not isinstance(owner, torch._C.ScriptModule):
        return None
    read: Any = owner
    return read.getattr(node.s("name"))


def _writes_tensors(graph: Any) -> bool:
    nodes = (inner for node in graph.nodes() for inner in with_nested(node))
    return any(writes(node) and is_tensor(node.inputsAt(0)) for node in nodes)
