"""Recognizes attention written as single operators: product, scale, mask, softmax, product."""

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
#: Operators with a number as operand, for which TorchScript has its own overloads.
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Scores:
    """``query keyᵀ scale``, masked.

    Attributes
    ----------
    query, key, mask
        All have the same leading axes. A model may view its scores with batches and heads on one
        axis or on two; the shape with the most axes is used, since masks are often constant along
        one of them.
    mask
        An additive mask; with `fill`, a bool mask that is true for visible scores, or for hidden
        ones if `hides`.
    causal
        Whether scores above the diagonal are hidden.
    fill
        The value of hidden scores.
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


def recognize_attention(program: ExportedProgram) -> None:
    """Replace attention by calls of PyTorch's own operator, in place. Attention whose scores or
    weights are used elsewhere, or whose operands broadcast, is left alone.
    """
    graph = program.graph
    recognizer = _Recognizer(program)
    for product in [node for node in graph.nodes if node.target in _MATMULS]:
        with graph.inserting_before(product):
            result = recognizer.attention(product)
        if result is not None:
            product.replace_all_uses_with(result)
    graph.eliminate_dead_code()


class _Recognizer:
    """Reads a graph backwards from its products, in their order."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.made: dict[tuple[Any, ...], fx.Node] = {}

    def attention(self, product: fx.Node) -> fx.Node | None:
        """Return the replacement for a product of attention weights and values, or None."""
        weights, value = product.args
        softmax = _softmax(weights)
        is_transposed = softmax is None
        if is_transposed:  # value weightsᵀ, which is (weights valueᵀ)ᵀ: images have positions last
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
        # More than one if a mask or a number promoted the scores to float64.
        dtypes = {_dtype(x) for x in (scores.query, softmax, product)}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            return None
        if is_transposed:
            value = self.transposed(value)
        if _has_symbols((_sizes(scores.query)[-1], _sizes(value)[-1])):  # kernels know them
            return None
        result = self.fused(product, self.viewed(value, scores.shape[:-2]), scores)
        result = self.viewed(result, _sizes(product)[:-2])
        return self.transposed(result) if is_transposed else result

    def fused(self, product: fx.Node, value: fx.Node, scores: _Scores) -> fx.Node:
        """Return attention over `value`, to replace a product."""
        mask = scores.mask
        if mask is not None and scores.hides:
            mask = self.call(aten.logical_not.default, mask)
        operands = [scores.query, scores.key, value]
        if mask is not None and len(_shape(mask)) > 2:
            operands.append(mask)
            mask = None
        # Before a view merged batches and heads, operands have the layout of the projections.
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
        """Read a chain backwards; None if it is not attention, or a part of it has other users."""
        node = _through_copies(node)
        if node is None:
            return None
        if node.target in _MATMULS:
            query, transposed = node.args
            if len(_shape(node)) < 3 or _shape(query)[:-2] != _shape(transposed)[:-2]:
                return None
            if 0 in _shape(node):  # views of empty tensors do not determine axes
                return None
            query, scale = _unscaled(query)
            return _Scores(query, self.transposed(transposed), scale)
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
        """Return scores with the axes of their view, if it has more."""
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
        # Filled scores would no longer have the fill value.
        if _dtype(mask) != _dtype(node) or scores.causal or scores.fill is not None:
            return None
        own = self.broadcast(mask, _sizes(node), scores.shape)
        if own is not None and scores.mask is not None:
            own = self.call(aten.add.Tensor, scores.mask, own)
        return None if own is None else replace(scores, mask=own)

    def filled(self, node: fx.Node) -> _Scores | None:
        """Read scores, some of which were replaced by a number."""
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
            # Scores that are already masked can only be hidden.
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
        """Return the mask for a view of the scores. None if an axis of the view merges an axis
        along which the mask is constant (of stride 0 when it is expanded) with one along which it
        is not: torch has no view of such a mask.
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
        """Return `x` with its last two axes swapped; if it is a transpose, its source."""
        source = _swapped(x)
        return self.call(aten.transpose.int, x, -2, -1) if source is None else source

    def viewed(self, x: fx.Node, lead: tuple[int, ...]) -> fx.Node:
        """Return `x` with other leading axes."""
        return self.reshaped(x, (*lead, *_sizes(x)[-2:]))

    def reshaped(self, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        return x if _shape(x) == identities_of(shape) else self.call(aten.reshape.default, x, shape)

    def call(self, operator: OpOverload, *args: Any) -> fx.Node:
        """Return a node that calls an operator; equal calls share one, as layers share a mask."""
        # symbols themselves cannot be compared without a guard
        made = (operator, *(identities_of(x) if isinstance(x, tuple) else x for x in args))
        if made not in self.made:
            node = args[0].graph.call_function(operator, args)
            node.meta = {"val": operator(*fx.node.map_arg(args, lambda x: x.meta["val"]))}
            self.made[made] = node
        return self.made[made]


def _apart(x: fx.Node) -> fx.Node | None:
    """Return the source of `x` before batches and heads were merged into one axis."""
    source = x.args[0] if x.target in _VIEWS else None
    if not isinstance(source, fx.Node) or (len(_shape(x)), len(_shape(source))) != (3, 4):
        return None
    return source if _shape(source)[2:] == _shape(x)[1:] else None


def _swapped(x: fx.Node | None) -> fx.Node | None:
    """Return the source of `x` if `x` only swaps its last two axes."""
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
    """Return the softmax, if the weights have no other users."""
    node = _through_copies(weights)
    while node is not None and node.target in _VIEWS:
        source = node.args[0]
        if _shape(source)[-2:] != _shape(node)[-2:]:
            return None
        node = _through_copies(source)
    return node if node is not None and node.target is aten._softmax.default else None


def _unscaled(x: fx.Node) -> tuple[fx.Node, float]:
    """Return the tensor and the number of a multiplication."""
    factor = _factor(x)
    return (x.args[0], factor) if factor else (x, 1.0)


def _factor(node: fx.Node) -> float | None:
    """Return the non-zero number by which a node multiplies a tensor."""
    if node.target not in (*_PRODUCTS, *_QUOTIENTS):
        return None
    x, by = node.args
    if not isinstance(by, (int, float)) or by == 0 or _dtype(x) != _dtype(node):
        return None
    return by if node.target in _PRODUCTS else 1 / by


def _through_copies(node: object) -> fx.Node | None:
    """Return the source of a chain of copies without other users."""
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
    """Return a shape for comparison, since comparing symbols themselves adds guards."""
    return identities_of(node.meta["val"].shape)


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    """Return a shape for creating tensors."""
    return tuple(node.meta["val"].shape)
