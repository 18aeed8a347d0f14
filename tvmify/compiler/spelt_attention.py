"""Recognise attention that a model spells out: product, scale, mask, softmax, product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isnan, nan
from typing import Any

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

_MATMULS = (aten.matmul.default, aten.bmm.default)
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
    products = [graph.find_nodes(op="call_function", target=target) for target in _MATMULS]
    for node in chain(*products):
        weights, value = node.args
        softmax = _softmax(weights)
        is_turned = softmax is None
        if is_turned:  # value weightsᵀ, which is (weights valueᵀ)ᵀ: images have places last
            value, weights = node.args
            softmax = _softmax(_swapped(_through_copies(weights)))
        if softmax is None:
            continue
        source, dim, _ = softmax.args
        scores = _scores(program, source)
        if scores is None or dim not in (-1, len(_shape(softmax)) - 1):
            continue
        leads = {_shape(x)[:-2] for x in (scores.query, scores.turned_key, value, softmax, node)}
        if len(leads) != 1 or len(_shape(node)) < 3:
            continue
        # More than one if a mask or a number has made the scores float64.
        dtypes = {_dtype(x) for x in (scores.query, softmax, node)}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            continue
        with graph.inserting_before(node):
            if is_turned:
                value = _transposed(value)
            result = _fused(node, value, scores)
            if is_turned:
                result = _transposed(result)
        node.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def _fused(node: fx.Node, value: fx.Node, scores: _Scores) -> fx.Node:
    """Return attention that weighs `value`; `node` says where the model does."""
    mask = _shown(scores)
    options = {"is_causal": scores.causal, "scale": scores.scale}
    operands = [scores.query, _transposed(scores.turned_key), value]
    if mask is not None and len(_shape(mask)) > 2:
        operands.append(mask)
        mask = None
    # Before a view joined batches and heads, operands are found where projections left them.
    apart = [source for x in operands if (source := _apart(x)) is not None]
    is_apart = len(apart) == len(operands) and len({_shape(x)[:2] for x in apart}) == 1
    query, key, value, *masks = apart if is_apart else operands
    arguments = (query, key, value, masks[0] if masks else mask)
    result = query.meta["val"].new_empty(*_shape(query)[:-1], _shape(value)[-1])
    operator = aten.scaled_dot_product_attention.default
    fused = node.graph.call_function(operator, arguments, options)
    fused.meta = {**node.meta, "val": result, EMPTY: nan, FILL: scores.fill}
    if not is_apart:
        return fused
    joined = [*_shape(scores.query)[:-1], _shape(value)[-1]]
    view = node.graph.call_function(aten.view.default, (fused, joined))
    view.meta = {**node.meta, "val": result.view(joined)}
    return view


def _apart(x: fx.Node) -> fx.Node | None:
    """Return what has batches and heads on an axis each, of which `x` has one for both."""
    source = x.args[0] if x.target is aten.view.default else None
    if not isinstance(source, fx.Node) or (len(_shape(x)), len(_shape(source))) != (3, 4):
        return None
    return source if _shape(source)[2:] == _shape(x)[1:] else None


def _transposed(x: fx.Node) -> fx.Node:
    """Return `x` with its last two axes swapped; what it is the transposed of, if it is one."""
    source = _swapped(x)
    if source is None:
        source = x.graph.call_function(aten.transpose.int, (x, -2, -1))
        source.meta = {"val": x.meta["val"].transpose(-2, -1)}
    return source


def _swapped(x: fx.Node | None) -> fx.Node | None:
    """Return what `x` is with its last two axes swapped, if it is no more than that."""
    if x is None or x.target not in (aten.transpose.int, aten.permute.default):
        return None
    arguments: Any = x.args
    order = list(range(rank := len(_shape(x))))
    if x.target is aten.permute.default:
        order = [axis % rank for axis in arguments[1]]
    else:
        one, other = (axis % rank for axis in arguments[1:])
        order[one], order[other] = other, one
    return arguments[0] if order == [*range(rank - 2), rank - 1, rank - 2] else None


def _softmax(weights: object) -> fx.Node | None:
    """Return the node that normalizes weights, if nobody else reads them."""
    node = _through_copies(weights)
    return node if node is not None and node.target is aten._softmax.default else None


def _scores(program: ExportedProgram, node: object) -> _Scores | None:
    """Read a chain backwards; None if it is none, or others read a part of it."""
    node = _through_copies(node)
    if node is None:
        return None
    if node.target in _MATMULS:
        query, turned = node.args
        query, scale = _unscaled(query)
        return _Scores(query, turned, scale)
    if node.target in (*_PRODUCTS, *_QUOTIENTS):
        factor = _factor(node)
        inner = _scores(program, node.args[0]) if factor else None
        # A factor after the mask would scale the mask as well.
        if inner is None or inner.is_masked:
            return None
        return replace(inner, scale=inner.scale * factor)
    if node.target is aten.add.Tensor and not node.kwargs:
        for x, mask in (node.args, node.args[::-1]):
            inner = _scores(program, x) if isinstance(mask, fx.Node) else None
            if inner is None or inner.is_masked or _shape(x) != _shape(node):
                continue
            return replace(inner, mask=mask) if _dtype(mask) == _dtype(node) else None
    if node.target is aten.where.self:
        return _filled(program, node)
    return None


def _filled(program: ExportedProgram, node: fx.Node) -> _Scores | None:
    """Read scores some of which were replaced by a number."""
    condition, *branches = node.args
    if _dtype(node) not in _DTYPES:
        return None
    for branch, x in zip(branches, reversed(branches), strict=True):
        number = constant_of(program, branch)
        if number is None or number.numel() != 1:
            continue
        inner = _scores(program, x)
        if inner is None or _shape(x) != _shape(node):
            return None
        fill = number.to(_dtype(node)).item()
        if isnan(fill):
            return None
        # Of two masks, each hides as well what the other shows, if both put the same there.
        both_hide = inner.fill == fill == -inf
        if inner.is_masked and not both_hide:
            return None
        hides = x is branches[1]
        is_least = fill <= torch.finfo(_dtype(node)).min
        if is_least and is_causal(program, condition, *_shape(node)[-2:], hides=hides):
            return replace(inner, causal=True, fill=fill)
        if inner.mask is not None:
            return None
        return replace(inner, mask=condition, hides=hides, fill=fill)
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


def _unscaled(x: fx.Node) -> tuple[fx.Node, float]:
    """Return what a number was multiplied with, and the number."""
    factor = _factor(x)
    return (x.args[0], factor) if factor else (x, 1.0)


def _factor(node: fx.Node) -> float | None:
    """Return by which number a node multiplies a tensor, 0 not being one."""
    if node.target not in (*_PRODUCTS, *_QUOTIENTS):
        return None
    x, by = node.args
    if not isinstance(by, (int, float)) or by == 0 or _dtype(x) != _dtype(node):
        return None
    return by if node.target in _PRODUCTS else 1 / by


def _through_copies(node: object) -> fx.Node | None:
    """Return what a value is a copy of, if nobody else reads any of them."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target is not aten.clone.default:
            return node
        node = node.args[0]
    return None


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
