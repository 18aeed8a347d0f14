"""What the schemas of ATen operators say about aliasing and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def argument_returned(node: fx.Node, *, written: bool) -> fx.Node | None:
    """Return the argument that the result is, or is a view of, as the schema says; None if none.

    Parameters
    ----------
    written
        Only an argument that the operator writes to.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    returned = schema.returns[0].alias_info if schema.returns else None
    if returned is None or (written and not returned.is_write):
        return None
    for argument, value in _arguments(node):
        info = argument.alias_info
        # the set is empty where the result is a list of views
        if info is not None and (info.before_set == returned.before_set or not returned.before_set):
            return value if isinstance(value, fx.Node) else None
    return None


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """Return the arguments of a call, each with its declaration in the schema."""
    given = []
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        given.append((argument, value))
    return given


def written_tensors(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a call writes to."""
    return [
        tensor
        for argument, value in _arguments(node)
        if argument.is_write
        for tensor in pytree.tree_leaves(value)
        if isinstance(tensor, fx.Node)
    ]


def is_resized(node: fx.Node, written: fx.Node) -> bool:
    """Whether a call gives an argument ``out=`` another shape; shapes that are only equal for some
    sizes count as others.
    """
    outs = [value for argument, value in _arguments(node) if argument.is_out]
    return any(
        out is written and out.meta["val"].shape != result.shape
        for out, result in zip(outs, pytree.tree_leaves(node.meta["val"]), strict=False)
    )


def is_fresh_literal(node: fx.Node) -> bool:
    """Whether a constant is a ``torch.tensor([...])`` in forward, which is always copied first."""
    copies = torch.ops.aten.lift_fresh_copy.default
    return bool(node.users) and all(user.target is copies for user in node.users)
