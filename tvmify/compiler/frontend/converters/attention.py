"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax

from tvmify.compiler import sizes
from tvmify.compiler.aten.operators import EMPTY, FILL
from tvmify.compiler.frontend.converters.reduction import multiplier
from tvmify.compiler.frontend.converters.registry import converts
from tvmify.compiler.frontend.masks import is_causal, is_neutral
from tvmify.compiler.kernels.attention.lower_attention import describe
from tvmify.compiler.sizes import Size
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

aten = torch.ops.aten


@converts("scaled_dot_product_attention.default")
def attention(importer: Importer, node: fx.Node) -> relax.Expr:
    """``softmax(q kᵀ scale + mask) v``.

    Queries that may attend to no key give zeros, as in eager's fused CPU kernel and its softmax for
    attention; but NaN where the model wrote attention as single operators.
    """
    query, key, value = node.args[:3]
    if not sizes.is_static(importer.shape(query)[-1], importer.shape(value)[-1]):
        raise UnsupportedOperator([str(node.target)], "the size of its heads is symbolic")
    mask = importer.argument(node, "attn_mask")
    causal = bool(importer.argument(node, "is_causal"))
    scale = importer.argument(node, "scale")
    if scale is None:
        scale = 1.0 / math.sqrt(importer.shape(query)[-1])
    shape = importer.shape(node)
    # An axis of the mask may be of batches or of heads; batches are found by position. The kernels
    # know the number of heads, so an axis whose size varies is one of batches.
    is_grouped = bool(importer.argument(node, "enable_gqa"))
    # The kernels share heads of keys and values alike; others are repeated.
    few = [importer.shape(x)[-3] for x in (key, value)] if is_grouped else []
    is_shared = is_grouped and sizes.is_static(shape[-3], *few) and sizes.same(*few)
    is_of_batches = not is_shared and (len(shape) == 3 or not sizes.is_static(*shape[-3:-2]))
    lead = (*shape[:-2], 1) if is_of_batches else (1, 1, *shape[:-2])
    batch, heads = sizes.product(lead[:-1]), lead[-1]
    dtype = multiplier(node.meta["val"].dtype)
    if importer.shape(key)[-2] == 0:
        return relax.op.zeros(list(shape), dtype)

    def operand(x: Any) -> relax.Expr:
        tensor = importer.tensor(x, dtype)
        if is_grouped and not is_shared:
            tensor = _with_repeated_heads(importer, tensor, shape[-3])
        *own, length, size = tensor.ty.shape.values
        outer = [*shape[:-3], own[-1]] if is_shared else list(shape[:-2])
        if not sizes.same_shape(own, outer):
            tensor = importer.emit(relax.op.broadcast_to(tensor, [*outer, length, size]))
        own_heads = own[-1] if is_shared else heads
        return _reshaped(importer, tensor, [batch, own_heads, length, size])

    q, k, v = (operand(x) for x in (query, key, value))
    bias, fill = None, node.meta.get(FILL)
    if mask is not None:
        if fill in (None, -math.inf):  # with other fills, a query that sees no key sees all
            mask, above = _reduced(
                importer, mask, importer.shape(query)[-2], importer.shape(key)[-2]
            )
            causal = causal or above
        bias = None if mask is None else _mask(importer, mask, dtype, lead, is_of_batches)
    empty = node.meta.get(EMPTY, 0.0)
    call = describe(q, k, v, bias, scale=float(scale), causal=causal, empty=empty, fill=fill)
    return _reshaped(importer, importer.emit(call), list(shape))


def _with_repeated_heads(importer: Importer, x: relax.Expr, heads: Size) -> relax.Expr:
    """Repeat each head of keys or values for the heads of the queries that share it."""
    *outer, own, length, size = x.ty.shape.values
    if sizes.same(own, heads):
        return x
    grouped = importer.emit(relax.op.expand_dims(x, -3))
    shape = [*outer, own, sizes.simplified(heads // own), length, size]
    wide = importer.emit(relax.op.broadcast_to(grouped, shape))
    return importer.emit(relax.op.reshape(wide, [*outer, heads, length, size]))


def _reshaped(importer: Importer, x: relax.Expr, shape: list[Size]) -> relax.Expr:
    if sizes.same_shape(x.ty.shape.values, shape):
        return x
    return importer.emit(relax.op.reshape(x, shape))


def _mask(
    importer: Importer,
    mask: fx.Node,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    is_of_batches: bool,
) -> relax.Expr:
    """Return a mask with four axes, each of which may be 1."""
    is_bool = mask.meta["val"].dtype is torch.bool
    tensor = importer.tensor(mask) if is_bool else importer.tensor(mask, dtype)
    shape = importer.shape(mask)
    *outer, queries, keys = [1] * (2 - len(shape)) + list(shape)
    if is_of_batches:
        outer.append(1)
    outer = [1] * (len(lead) - len(outer)) + outer
    batch_axes = sum(not sizes.is_one(size) for size in lead[:-1])
    if batch_axes > 1 and not all(map(sizes.is_one, outer[:-1])):
        full = [*lead[:-1], outer[-1], queries, keys]
        tensor = _reshaped(importer, tensor, [*outer, queries, keys])
        tensor = importer.emit(relax.op.broadcast_to(tensor, full))
        outer = full[:-2]
    return _reshaped(importer, tensor, [sizes.product(outer[:-1]), outer[-1], queries, keys])


def _reduced(
    importer: Importer, mask: fx.Node, queries: int, keys: int
) -> tuple[fx.Node | None, bool]:
    """Return the rest of a mask, and whether it was causal as well. Broadcasts are removed, and the
    parts of an "and" that are causal or all true: a mask of padded keys then needs no element per
    query.
    """
    if mask.target in (aten.expand.default, aten.clone.default):
        return _reduced(importer, mask.all_input_nodes[0], queries, keys)
    parts = mask.all_input_nodes
    is_and = mask.target in (aten.bitwise_and.Tensor, aten.logical_and.default)
    if is_and and all(part.meta["val"].dtype is torch.bool for part in parts):
        found = [_reduced(importer, part, queries, keys) for part in parts]
        left = [part for part, _ in found if part is not None]
        if len(left) > 1:
            return mask, False
        return next(iter(left), None), any(causal for _, causal in found)
    if not sizes.is_static(*importer.shape(mask)):
        if importer.formulas.is_causal(mask, queries, keys):
            return None, True
        return None if importer.formulas.is_neutral(mask) else mask, False
    if is_causal(importer.program, mask, queries, keys):
        return None, True
    return None if is_neutral(importer.program, mask) else mask, False
