"""Recognise attention that a model spells out: product, scale, mask, softmax, product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan

import torch
from torch import fx
from torch.export import ExportedProgram

from tvmify.compiler.constants import constant_of
from tvmify.compiler.masks import is_causal

aten = torch.ops.aten

#: Key of a node's meta: what a query yields that sees no key. Spelt out, that is 0 / 0.
EMPTY = "tvmify.empty"

_TURNS = (aten.transpose.int, aten.permute.default, aten.t.default)
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Scores:
    """``query turned_key scale + mask``, of which `causal` leaves the lower triangle."""

    query: fx.Node
    turned_key: fx.Node
    scale: float = 1.0
    mask: fx.Node | None = None
    causal: bool = False

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
                (query, key, value, scores.mask),
                {"is_causal": scores.causal, "scale": scores.scale},
            )
        fused.meta = {**node.meta, EMPTY: nan}
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
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        x, factor = node.args
        inner = _scores(program, x) if isinstance(factor, (int, float)) else None
        # A factor after the mask would scale the mask as well.
        if inner is None or inner.is_masked or factor == 0:
            return None
        by = factor if node.target is aten.mul.Tensor else 1 / factor
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
    """Read scores of which those above the diagonal were replaced by the least number.

    Others that are replaced are left alone: what is added to a score that is NaN does not hide it.
    """
    condition, *branches = node.args
    fills = [constant_of(program, branch) for branch in branches]
    for fill, x in zip(fills, reversed(branches), strict=True):
        if fill is None or fill.numel() != 1 or fill.item() > torch.finfo(fill.dtype).min:
            continue
        inner = _scores(program, x)
        if inner is None or inner.is_masked or _shape(x) != _shape(node):
            return None
        hides = x is branches[1]
        known = is_causal(program, condition, *_shape(node)[-2:], hides=hides)
        return replace(inner, causal=True) if known else None
    return None


def _through_copies(node: object) -> fx.Node | None:
    """Return what a value is a copy of, if nobody else reads any of them."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target is not aten.clone.default:
            return node
        node = node.args[0]
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
