"""Which writes of a program may go to the caller's tensors themselves, without a copy of them.

A program without writes has ``cache[:n, start:end] = x`` as slices of slices, which are written
back one by one::

    rows = slice(cache, 0, 0, n)
    part = copy(slice(rows, 1, start, end), x)
    cache = slice_scatter(cache, slice_scatter(rows, part, 1, start, end), 0, 0, n)

The last operator then stands for a write of ``part`` to a `Region` of the cache.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

_ATEN = torch.ops.aten
_SLICE, _SELECT = _ATEN.slice.Tensor, _ATEN.select.int
#: What each of them writes to.
_PARTS = {_ATEN.slice_scatter.default: _SLICE, _ATEN.select_scatter.default: _SELECT}


class Step(NamedTuple):
    """A slice of an axis, or an index that removes it.

    Attributes
    ----------
    axis
        Of the whole tensor.
    size
        Of the axis before it.
    start
        Where the slice begins, or the index: a number or a node; None is 0.
    is_index
        Whether it removes the axis.
    """

    axis: int
    size: int | torch.SymInt
    start: Any
    is_index: bool


class Region(NamedTuple):
    """A part of a tensor, without gaps along its axes, that is written to.

    Attributes
    ----------
    steps
        From the whole tensor to the part.
    value
        What is written: a node with the shape of the part.
    scatters
        The operators that write it.
    """

    steps: tuple[Step, ...]
    value: fx.Node
    scatters: frozenset[fx.Node]


def drop_whole_slices(graph: fx.Graph) -> None:
    """Remove slices of whole axes from a functional program, and what writes these back."""
    for node in graph.nodes:
        if node.target is _SLICE and _is_whole(node, node):
            # As a result it stays: it is a view.
            node.replace_all_uses_with(node.args[0], lambda user: user.op != "output")
        elif node.target is _ATEN.slice_scatter.default and _is_whole(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
    graph.eliminate_dead_code()


def writes_in_place(
    written: Collection[fx.Node], returned: Collection[fx.Node]
) -> Collection[fx.Node]:
    """Return the operators that write to a tensor whose old elements nothing reads.

    A call that fails runs again in eager PyTorch, so that writing twice must have the effect of
    writing once: what is written must not depend on what was there.

    Parameters
    ----------
    written
        The new values of what a functional program writes to.
    returned
        Values that belong to the caller, who may write to them.
    """
    return {
        write for node in written if node not in returned for write in _writes_to_argument(node)
    }


def region_of(node: fx.Node) -> Region | None:
    """Return what a scatter writes to; None for other operators, and for regions with gaps."""
    steps: list[Step] = []
    scatters: list[fx.Node] = []
    axes = list(range(node.meta["val"].dim()))
    value: Any = node
    while _continues(scatters, value):
        scatters.append(value)
        axis, start, *_ = _range(value)
        is_index = _PARTS[value.target] is _SELECT
        size = value.args[0].meta["val"].shape[axis]
        steps.append(Step(axes[axis], size, start, is_index))
        if is_index:
            del axes[axis]
        value = value.args[1]
    return Region(tuple(steps), value, frozenset(scatters)) if steps else None


def _is_whole(node: fx.Node, part: Any) -> bool:
    """Whether a slice, or what a scatter writes, is the whole tensor in its order."""
    return _step(node) == 1 and _sizes(part) == _sizes(node.args[0])


def _continues(scatters: list[fx.Node], value: fx.Node) -> bool:
    """Whether a value is a scatter to the part that the last scatter writes to."""
    if value.target not in _PARTS or _step(value) != 1:
        return False
    if not scatters:
        return True
    outer, part = scatters[-1], value.args[0]
    return (
        isinstance(part, fx.Node)
        and part.target is _PARTS[outer.target]
        and _range(part) == _range(outer)
        and _is_same(part.args[0], outer.args[0])
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two nodes are the same part of the same tensor."""
    return one is other or (
        isinstance(one, fx.Node)
        and isinstance(other, fx.Node)
        and one.target is other.target
        and one.target in (_SLICE, _SELECT)
        and _range(one) == _range(other)
        and _is_same(one.args[0], other.args[0])
    )


def _writes_to_argument(node: fx.Node) -> Collection[fx.Node]:
    """Return the writes by which an argument becomes a value; none if anything reads it before."""
    region = region_of(node)
    scatters = region.scatters if region else {node}
    source = node.args[0] if node.args else None
    if node.target is not _ATEN.index_put.default and region is None:
        return ()
    if not isinstance(source, fx.Node) or _is_read(source, scatters):
        return ()
    if source.op == "placeholder":
        return (node,)
    earlier = _writes_to_argument(source)
    return (*earlier, node) if earlier else ()


def _is_read(tensor: fx.Node, scatters: Collection[fx.Node]) -> bool:
    """Whether any operator but the scatters depends on the elements of a tensor."""
    for user in tensor.users:
        is_first_only = [leaf is tensor for leaf in pytree.tree_leaves(user.args)].count(True) == 1
        is_first_only = is_first_only and user.args[0] is tensor
        is_unread = user in scatters or user.target is _ATEN.copy.default
        is_part = user.target in (_SLICE, _SELECT) and not _is_read(user, scatters)
        if not (is_first_only and (is_unread or is_part)):
            return True
    return False


def _range(node: fx.Node) -> tuple[Any, ...]:
    """Return the axis and the limits, or the index, of a slice, a scatter or an index."""
    given = node.args[1:] if node.target in (_SLICE, _SELECT) else node.args[2:]
    assert isinstance(node.args[0], fx.Node)
    axis, *limits = given or (0,)
    return int(axis) % node.args[0].meta["val"].dim(), *limits, *[None] * (3 - len(limits))  # type: ignore[arg-type]


def _step(node: fx.Node) -> Any:
    return _range(node)[3] or 1


def _sizes(tensor: Any) -> list[Any]:
    shape = tensor.meta["val"].shape
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
