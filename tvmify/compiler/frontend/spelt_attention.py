"""Recognise attention that a model spells out: product, scale, mask, softmax, product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isnan, nan
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from tvmify.compiler.aten.operators import EMPTY, FILL
from tvmify.compiler.frontend.constants import constant_of
from tvmify.compiler.frontend.masks import is_causal
from tvmify.torch_compat.symbols import identities_of, is_symbolic

aten = torch.ops.aten

_MATMULS = (aten.matmul.default, aten.bmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
#: With a number: TorchScript has overloads of their own for that.
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Scores:
    """``query keyᵀ scale``, masked.

    Attributes
    ----------
    query, key, mask
        Their leading axes are those of one shape. A model may view its scores in several, as with
        batches and heads on one axis or on two: it is that of most axes, since masks are often the
        same along one of them.
    mask
        What is added; with `fill`, where scores are shown, or hidden if `hides`.
    causal
        Whether those above the diagonal are hidden.
    fill
        What stands for the scores that are hidden.
    """

    query: fx.Node
    key: fx.Node
    scale: float = 1.0
    mask: fx.Node | None = None
    hides: bool = False
    causal: bool = False
    fill: float | None = None

    @property
    def is_masked(self) -> bool:
        return self.mask is not None or self.causal

    @property
    def shape(self) -> tuple[int, ...]:
        return *_sizes(self.query)[:-1], _sizes(self.key)[-2]


def recognise_attention(program: ExportedProgram) -> None:
    """Replace, in place, what computes attention by one node of PyTorch's own operator for it.

    Left alone is what shows its scores or weights to others, and what broadcasts its operands.
    """
    graph = program.graph
    recogniser = _Recogniser(program)
    for product in [node for node in graph.nodes if node.target in _MATMULS]:
        with graph.inserting_before(product):
            result = recogniser.attention(product)
        if result is not None:
            product.replace_all_uses_with(result)
    graph.eliminate_dead_code()


class _Recogniser:
    """Reads a graph backwards from its products, in their order."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.made: dict[tuple[Any, ...], fx.Node] = {}

    def attention(self, product: fx.Node) -> fx.Node | None:
        """Return what stands for a product of weights and values, if it is one."""
        weights, value = product.args
        softmax = _softmax(weights)
        is_turned = softmax is None
        if is_turned:  # value weightsᵀ, which is (weights valueᵀ)ᵀ: images have places last
            value, weights = product.args
            softmax = _softmax(_swapped(_through_copies(weights)))
        if softmax is None:
            return None
        source, dim, _ = softmax.args
        scores = self.scores(source)
        if scores is None or dim not in (-1, len(_shape(softmax)) - 1):
            return None
        if len({_shape(x)[:-2] for x in (weights, value, product)}) != 1:
            return None
        if len(_shape(value)) < 2:  # a vector has no leading axes either
            return None
        # More than one if a mask or a number has made the scores float64.
        dtypes = {_dtype(x) for x in (scores.query, softmax, product)}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            return None
        if is_turned:
            value = self.transposed(value)
        result = self.fused(product, self.viewed(value, scores.shape[:-2]), scores)
        result = self.viewed(result, _sizes(product)[:-2])
        return self.transposed(result) if is_turned else result

    def fused(self, product: fx.Node, value: fx.Node, scores: _Scores) -> fx.Node:
        """Return attention that weighs `value`, in the place of a product."""
        mask = scores.mask
        if mask is not None and scores.hides:
            mask = self.call(aten.logical_not.default, mask)
        operands = [scores.query, scores.key, value]
        if mask is not None and len(_shape(mask)) > 2:
            operands.append(mask)
            mask = None
        # Before a view joined batches and heads, operands are found where projections left them.
        apart = [source for x in operands if (source := _apart(x)) is not None]
        is_apart = len(apart) == len(operands) and len({_shape(x)[:2] for x in apart}) == 1
        query, key, value, *masks = apart if is_apart else operands
        arguments = (query, key, value, masks[0] if masks else mask)
        options = {"is_causal": scores.causal, "scale": scores.scale}
        operator = aten.scaled_dot_product_attention.default
        fused = product.graph.call_function(operator, arguments, options)
        result = query.meta["val"].new_empty(*_sizes(query)[:-1], _sizes(value)[-1])
        fused.meta = {**product.meta, "val": result, EMPTY: nan, FILL: scores.fill}
        return self.viewed(fused, scores.shape[:-2])

    def scores(self, node: object) -> _Scores | None:
        """Read a chain backwards; None if it is none, or others read a part of it."""
        node = _through_copies(node)
        if node is None:
            return None
        if node.target in _MATMULS:
            query, turned = node.args
            if len(_shape(node)) < 3 or _shape(query)[:-2] != _shape(turned)[:-2]:
                return None
            if 0 in _shape(node):  # views of nothing say nothing about axes
                return None
            query, scale = _unscaled(query)
            return _Scores(query, self.transposed(turned), scale)
        if node.target in _VIEWS:
            inner = self.scores(node.args[0])
            return None if inner is None else self.taken_apart(inner, _sizes(node))
        if node.target in (*_PRODUCTS, *_QUOTIENTS):
            factor = _factor(node)
            inner = self.scores(node.args[0]) if factor else None
            # A factor after the mask would scale the mask as well.
            if inner is None or inner.is_masked:
                return None
            return replace(inner, scale=inner.scale * factor)
        if node.target is aten.add.Tensor and not node.kwargs:
            for x, mask in (node.args, node.args[::-1]):
                inner = self.scores(x) if isinstance(mask, fx.Node) else None
                if inner is None or _shape(x) != _shape(node):
                    continue
                masked = self.added(inner, mask, node)
                if masked is not None:
                    return masked
        if node.target is aten.where.self:
            return self.filled(node)
        return None

    def taken_apart(self, scores: _Scores, shape: tuple[int, ...]) -> _Scores | None:
        """Return scores with the axes of a view of them, if those are more."""
        if identities_of(shape[-2:]) != identities_of(scores.shape[-2:]):
            return None
        if len(shape) <= len(scores.shape):
            return scores
        mask = scores.mask
        if mask is not None:
            mask = self.broadcast(mask, scores.shape, shape)
            if mask is None:
                return None
        query, key = (self.viewed(x, shape[:-2]) for x in (scores.query, scores.key))
        return replace(scores, query=query, key=key, mask=mask)

    def added(self, scores: _Scores, mask: fx.Node, node: fx.Node) -> _Scores | None:
        """Return scores to which `node` adds a mask."""
        # What was filled would not be that number any more.
        if _dtype(mask) != _dtype(node) or scores.causal or scores.fill is not None:
            return None
        own = self.broadcast(mask, _sizes(node), scores.shape)
        if own is not None and scores.mask is not None:
            own = self.call(aten.add.Tensor, scores.mask, own)
        return None if own is None else replace(scores, mask=own)

    def filled(self, node: fx.Node) -> _Scores | None:
        """Read scores some of which were replaced by a number."""
        condition, *branches = node.args
        if _dtype(node) not in _DTYPES:
            return None
        for branch, x in zip(branches, reversed(branches), strict=True):
            number = constant_of(self.program, branch)
            if number is None or number.numel() != 1:
                continue
            inner = self.scores(x)
            if inner is None or _shape(x) != _shape(node):
                return None
            fill = number.to(_dtype(node)).item()
            if isnan(fill):
                return None
            # What is masked already, by numbers that were added or by -∞, can only be hidden.
            if inner.is_masked and (fill != -inf or inner.fill not in (None, -inf)):
                return None
            hides = x is branches[1]
            is_least = fill <= torch.finfo(_dtype(node)).min
            if is_least and is_causal(self.program, condition, *_shape(node)[-2:], hides=hides):
                return replace(inner, causal=True, fill=fill if inner.mask is None else inner.fill)
            if inner.mask is not None:
                return None
            mask = self.broadcast(condition, _sizes(node), inner.shape)
            return None if mask is None else replace(inner, mask=mask, hides=hides, fill=fill)
        return None

    def broadcast(
        self, mask: fx.Node, shape: tuple[int, ...], view: tuple[int, ...]
    ) -> fx.Node | None:
        """Return what broadcasts to the view of a shape as a mask does to the shape.

        None if an axis of the view joins one along which the mask is the same, which has stride 0
        when it is expanded, with one along which it is not. Torch has no view of such a mask.
        """
        if identities_of(shape) == identities_of(view):
            return mask
        if is_symbolic(mask.meta["val"]) or _has_symbols(shape) or _has_symbols(view):
            return None  # which axes a view joins, numbers say
        expanded = torch.empty(_shape(mask), device="meta").expand(shape)
        try:
            strides = expanded.view(view).stride()
        except RuntimeError:
            return None
        return self.reshaped(
            mask, tuple(n if stride else 1 for n, stride in zip(view, strides, strict=True))
        )

    def transposed(self, x: fx.Node) -> fx.Node:
        """Return `x` with its last two axes swapped; what it is the transposed of, if it is one."""
        source = _swapped(x)
        return self.call(aten.transpose.int, x, -2, -1) if source is None else source

    def viewed(self, x: fx.Node, lead: tuple[int, ...]) -> fx.Node:
        """Return `x` with other leading axes than its own."""
        return self.reshaped(x, (*lead, *_sizes(x)[-2:]))

    def reshaped(self, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        return x if _shape(x) == identities_of(shape) else self.call(aten.reshape.default, x, shape)

    def call(self, operator: OpOverload, *args: Any) -> fx.Node:
        """Return a node that calls an operator: layers that share a mask share what it becomes."""
        made = (operator, *args)
        if made not in self.made:
            node = args[0].graph.call_function(operator, args)
            node.meta = {"val": operator(*fx.node.map_arg(args, lambda x: x.meta["val"]))}
            self.made[made] = node
        return self.made[made]


def _apart(x: fx.Node) -> fx.Node | None:
    """Return what has batches and heads on an axis each, of which `x` has one for both."""
    source = x.args[0] if x.target in _VIEWS else None
    if not isinstance(source, fx.Node) or (len(_shape(x)), len(_shape(source))) != (3, 4):
        return None
    return source if _shape(source)[2:] == _shape(x)[1:] else None


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
    while node is not None and node.target in _VIEWS:
        source = node.args[0]
        if _shape(source)[-2:] != _shape(node)[-2:]:
            return None
        node = _through_copies(source)
    return node if node is not None and node.target is aten._softmax.default else None


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


def _has_symbols(sizes: tuple[Any, ...]) -> bool:
    return not all(isinstance(size, int) for size in identities_of(sizes))


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """Return a shape to compare: to compare symbols themselves would assume an answer."""
    return identities_of(node.meta["val"].shape)


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    """Return a shape to make tensors of."""
    return tuple(node.meta["val"].shape)
