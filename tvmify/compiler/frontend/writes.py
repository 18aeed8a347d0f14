"""Which writes of a program may go to the caller's tensors themselves, without a copy of them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils import _pytree as pytree

_SLICE = torch.ops.aten.slice_scatter.default
_WRITING = (torch.ops.aten.index_put.default, torch.ops.aten.select_scatter.default, _SLICE)


def writes_in_place(
    written: Collection[fx.Node], returned: Collection[fx.Node]
) -> Collection[fx.Node]:
    """Return the operators that write rows of a tensor that nothing else reads before.

    A call that fails runs again in eager PyTorch, so that writing twice must have the effect of
    writing once: what is written must not depend on what was there. Since the operator alone reads
    the old elements, it does not.

    Parameters
    ----------
    written
        The new values of what a functional program writes to.
    returned
        Values that belong to the caller, who may write to them.
    """
    return {node for node in written if node not in returned and _reads_alone(node)}


def _reads_alone(node: fx.Node) -> bool:
    if node.target not in _WRITING or _has_gaps(node):
        return False
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and source.op == "placeholder"
        and set(source.users) == {node}
        and sum(leaf is source for leaf in pytree.tree_leaves(node.args)) == 1
    )


def _has_gaps(node: fx.Node) -> bool:
    step = node.args[5] if len(node.args) > 5 else node.kwargs.get("step", 1)
    return node.target is _SLICE and step != 1
