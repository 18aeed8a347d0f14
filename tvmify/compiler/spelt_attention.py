"""Recognise attention that a model spells out: product, scale, mask, softmax, product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan

import torch
from torch import fx
from torch.export import ExportedProgram

from tvmify.compiler.constants import constant_of
from tvmify.compiler.masks import is_causal

aten = torch.ops.aten

#: Key of a node's meta: what a query yields that sees no key. Spelt out, that is 0 / 0.
EMPTY = "tvmify.empty"
#: Key of a node's meta: what stands for the scores that the mask, of bool, does not show.
FILL = "tvmify.fill"

_TURNS = (aten.transpose.int, aten.permute.default, aten.t.default)
#: With a number: TorchScript has overloads of their own for that.
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Scores:
    """``query turned_key scale``, masked.

    Attributes
    ----------
    mask
        What is added; with `fill`, where scores are shown, or hidden if `hides`.
    causal
        Whether those above the diagonal are hidden.
    fill
        What stands for the scores that are hidden.
    """

    query: fx.Node
    turned_key: fx.Node
    scale: float = 1.0
    mask: fx.Node | None = None
    hides: bool = False
    causal: bool = False
    fill: float | None = None

    @property
    def is_masked(self) -> bool:
        return self.mask is not None or self.causal


def recognise_attention(program: ExportedProgram) -> None:
    """Replace, in place, what computes attention by one node of PyTorch's own operator for it.

    Left alone is what shows its scores or weights to others, and what broadcasts its operands.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        weights, value = node.args
        softmax = _through_copies(weights)
        if softmax is None or softmax.target is not aten._softmax.default:
            continue
        source, dim, _ = softmax.args
        scores = _scores(program, source)
        if scores is None or dim not in (-1, len(_shape(softmax)) - 1):
            continue
        query, turned = scores.query, scores.turned_key
        leads = {_shape(x)[:-2] for x in (query, turned, value, softmax, node)}
        if len(leads) != 1 or query.meta["val"].dtype not in _DTYPES or len(_shape(node)) < 3:
            continue
        with graph.inserting_before(node):
            key = graph.call_function(aten.transpose.int, (turned, -2, -1))
            key.meta = {"val": turned.meta["val"].transpose(-2, -1)}
            fused = graph.call_function(
                aten.scaled_dot_product_attention.default,
                (query, key, value, _shown(scores)),
                {"is_causal": scores.causal, "scale": scores.scale},
            )
        fused.meta = {**node.meta, EMPTY: nan, FILL: scores.fill}
        node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()


def _scores(program: ExportedProgram, node: object) -> _Scores | None:
    """Read a chain backwards; None if it is none, or others read a part of it."""
    node = _through_copies(node)
    if node is None:
        return None
    if node.target is aten.matmul.default:
        query, turned = node.args
        return _Scores(query, turned) if turned.target in _TURNS else None
    if node.target in (*_PRODUCTS, *_QUOTIENTS):
        x, factor = node.args
        inner = _scores(program, x) if isinstance(factor, (int, float)) else None
        # A factor after the mask would scale the mask as well.
        if inner is None or inner.is_masked or factor == 0:
            return None
        by = factor if node.target in _PRODUCTS else 1 / factor
        return replace(inner, scale=inner.scale * by)
    if node.target is aten.add.Tensor and not node.kwargs:
        x, mask = node.args
        inner = _scores(program, x) if isinstance(mask, fx.Node) else None
        if inner is None or inner.is_masked or _shape(x) != _shape(node):
            return None
        same = mask.meta["val"].dtype == node.meta["val"].dtype
        return replace(inner, mask=mask) if same else None
    if node.target is aten.where.self:
        return _filled(program, node)
    return None


def _filled(program: ExportedProgram, node: fx.Node) -> _Scores | None:
    """Read scores some of which were replaced by a number."""
    condition, *branches = node.args
    for branch, x in zip(branches, reversed(branches), strict=True):
        number = constant_of(program, branch)
        if number is None or number.numel() != 1:
            continue
        inner = _scores(program, x)
        if inner is None or _shape(x) != _shape(node):
            return None
        fill = number.item()
        # Of two masks, each hides as well what the other shows, if both put the same there.
        if inner.is_masked and not inner.fill == fill == -inf:
            return None
        hides = x is branches[1]
        least = fill <= torch.finfo(number.dtype).min
        if least and is_causal(program, condition, *_shape(node)[-2:], hides=hides):
            return replace(inner, causal=True, fill=fill)
        return replace(inner, mask=condition, hides=hides, fill=fill) if not inner.mask else None
    return None


def _shown(scores: _Scores) -> fx.Node | None:
    """Return the mask as the operator takes it, for which true is what is shown."""
    mask = scores.mask
    if mask is None or not scores.hides:
        return mask
    graph = mask.graph
    shown = graph.call_function(aten.logical_not.default, (mask,))
    shown.meta = {"val": torch.logical_not(mask.meta["val"])}
    return shown


def _through_copies(node: object) -> fx.Node | None:
    """Return what a value is a copy of, if nobody else reads any of them."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target is not aten.clone.default:
            return node
        node = node.args[0]
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
