"""Calls of custom operators that write to their arguments, as PyTorch makes them functional.

Such a call takes the tensors that own the written memory, of which the operator gets copies, or
views of copies. It returns the results of the operator, and then the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import (
    AsStridedViewInfo,
    ViewInfo,
    get_mutable_args_from_schema,
    read_view_information_from_args,
)
from torch.utils import _pytree as pytree

from tvmify.compiler.aten import operators


@dataclass(frozen=True)
class Written:
    """What such a call writes to.

    Attributes
    ----------
    bases
        The tensors that own the memory.
    views
        For each argument that is written to: how it is a view of one of them, a list of that, or
        None.
    """

    bases: tuple[fx.Node, ...]
    views: dict[str, ViewInfo | list[ViewInfo | None] | None]

    @classmethod
    def of(cls, node: fx.Node) -> Written:
        """Read it from a call; nothing is written by one of an ordinary operator."""
        if node.target is not operators.FUNCTIONALIZED:
            return cls((), {})
        names, types = get_mutable_args_from_schema(operators.schema(node))
        bases: Any = node.kwargs["_all_bases"]
        kwargs = dict(node.kwargs)
        return cls(tuple(bases), read_view_information_from_args(names, types, kwargs, bases))

    @property
    def is_known(self) -> bool:
        """Whether the views are the same in compiled code, where all tensors are contiguous."""
        views = [view for view in pytree.tree_leaves(list(self.views.values())) if view is not None]
        numbers = [number for view in views for number in pytree.tree_leaves(vars(view))]
        bases = [
            self.bases[view.base_index].meta["val"]
            for view in views
            if isinstance(view, AsStridedViewInfo)
        ]
        return all(x.is_contiguous() and not x.storage_offset() for x in bases) and not any(
            isinstance(number, fx.Node) for number in numbers
        )


def can_functionalize(node: fx.Node) -> bool:
    """Whether compiled code can call an operator that writes to its arguments.

    Results that are an argument would share memory with its copy.
    """
    called = operators.operator(node)
    if node.target is not operators.FUNCTIONALIZED or not isinstance(called, torch._ops.OpOverload):
        return False
    returns_argument = any(each.alias_info is not None for each in called._schema.returns)
    return not returns_argument and Written.of(node).is_known
