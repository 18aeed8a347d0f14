"""Recognizes causal and empty masks that the program itself computes. The mask of a long sequence
is too large to fold, and fused attention avoids keeping it in memory. So it is computed a few rows
at a time, and only the answer is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from tvm.ir import Expr

from tvmify.compiler.frontend.constants import constant_of, is_pure
from tvmify.torch_compat.symbols import identities_of

aten = torch.ops.aten

#: Elements that are computed at a time, so that intermediate values stay in the cache.
_AT_A_TIME = 1 << 17

#: Answers by mask, since most models use one mask for all layers.
_FOUND: WeakKeyDictionary[fx.Node, dict[Hashable, bool]] = WeakKeyDictionary()

#: Operators that do not move the last two axes if their extents do not change.
_RESHAPES = (
    aten.alias.default,
    aten.reshape.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
)


def is_causal(
    program: ExportedProgram, mask: fx.Node, queries: int, keys: int, *, hides: bool = False
) -> bool:
    """Whether a mask is known to be causal: each query sees exactly the keys up to its position.

    Parameters
    ----------
    program
        The program that contains the mask.
    mask
        A bool mask, or one that is added to the scores.
    queries, keys
        Their numbers: the last two extents of such a mask.
    hides
        Whether a bool mask is true for hidden keys.
    """
    if _shape(mask)[-2:] != (queries, keys):
        return False

    def holds(first: int, rows: torch.Tensor) -> bool:
        if rows.dtype is torch.bool:
            shown = rows != hides
        else:
            shown = rows == 0
            if not bool((shown | (rows <= torch.finfo(rows.dtype).min)).all()):
                return False
        key = torch.arange(keys, device=rows.device)
        query = torch.arange(first, first + rows.shape[-2], device=rows.device)
        return bool((shown == (key <= query.unsqueeze(-1))).all())

    return _all_rows(program, mask, (queries, keys, hides), holds)


def is_neutral(program: ExportedProgram, mask: fx.Node) -> bool:
    """Whether a bool or additive mask is known to hide nothing."""

    def holds(_: int, rows: torch.Tensor) -> bool:
        return bool(rows.all()) if rows.dtype is torch.bool else not bool(rows.any())

    return _all_rows(program, mask, "neutral", holds)


def _all_rows(
    program: ExportedProgram,
    mask: fx.Node,
    question: Hashable,
    holds: Callable[[int, torch.Tensor], bool],
) -> bool:
    """Whether the rows of a mask are known and pass a test, which gets the first row's number."""
    found = _FOUND.setdefault(mask, {})
    if question not in found:
        found[question] = _look(program, mask, holds)
    return found[question]


def _look(
    program: ExportedProgram, mask: fx.Node, holds: Callable[[int, torch.Tensor], bool]
) -> bool:
    shape = (1, 1, *_shape(mask))
    if not all(isinstance(size, int) for size in shape):
        return False
    step = max(1, _AT_A_TIME // max(1, math.prod(shape[:-2]) * shape[-1]))
    for first in range(0, shape[-2], step):
        rows = _rows(program, mask, first, min(first + step, shape[-2]))
        if rows is None or not holds(first, rows):
            return False
    return True


def _rows(program: ExportedProgram, mask: fx.Node, first: int, end: int) -> torch.Tensor | None:
    """Compute the rows from `first` up to `end`, or None if they are unknown."""
    count = (1, 1, *_shape(mask))[-2]

    @cache
    def known(node: fx.Node) -> torch.Tensor | None:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        size = list(_shape(node))
        has_rows = len(size) > 1 and size[-2] == count  # otherwise each row depends on all of it
        constant = constant_of(program, node)
        if constant is not None:
            return constant[..., first:end, :] if has_rows else constant
        if not is_pure(node) or any(known(source) is None for source in node.all_input_nodes):
            return None
        if any(
            isinstance(leaf, Expr) for leaf in pytree.arg_tree_leaves(*node.args, **node.kwargs)
        ):
            return None  # a size, or a number, that differs from call to call
        if has_rows:
            size[-2] = end - first
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), known)
        if node.target is aten.full.default:
            return aten.full.default(size, *arguments[1:], **keywords)
        if node.target is aten.expand.default:
            return arguments[0].expand(size)
        if node.target in _RESHAPES and _shape(node)[-2:] == _shape(node.args[0])[-2:]:
            return arguments[0].reshape(size)
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if is_pointwise or node.target is aten._to_copy.default:
            return node.target(*arguments, **keywords)
        return None

    return known(mask)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return identities_of(node.meta["val"].shape)
