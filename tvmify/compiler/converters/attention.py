"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from tvmify.compiler.constants import constant_of
from tvmify.compiler.converters.reduction import accumulator
from tvmify.compiler.converters.registry import converts, dtype_of
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.importer import Importer


@converts("scaled_dot_product_attention.default")
def attention(importer: Importer, node: fx.Node) -> relax.Expr:
    """``softmax(q kᵀ scale + mask) v``.

    Rows that no key may attend to give NaN in eager's reference formula and zeros in its fused
    CPU kernel; here they give zeros, as there.
    """
    query, key, value = node.args[:3]
    mask = importer.argument(node, 3, "attn_mask")
    if importer.argument(node, 4, "dropout_p", 0.0):
        raise UnsupportedOperator([str(node.target)], "it drops out at random")
    causal = bool(importer.argument(node, 5, "is_causal", False))
    scale = node.kwargs.get("scale")
    dtype = accumulator(node.meta["val"].dtype)
    q, k, v = (importer.tensor(x, dtype) for x in (query, key, value))
    if node.kwargs.get("enable_gqa", False):
        heads = importer.shape(query)[-3]
        k, v = (_share_heads(importer, x, heads) for x in (k, v))
    if scale is None:
        scale = 1.0 / math.sqrt(importer.shape(query)[-1])
    rank = len(k.ty.shape)
    keys = importer.emit(relax.op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
    # The smaller of the two factors is scaled: the queries, not the scores.
    scores = importer.emit(relax.op.matmul(_times(importer, q, scale), keys))
    if causal:
        rows, columns = importer.shape(query)[-2], importer.shape(key)[-2]
        allowed = relax.const(np.tril(np.ones((rows, columns), "bool")))
        scores = importer.emit(relax.op.where(allowed, scores, _minus_infinity(scores)))
    scores, blocked = _masked(importer, scores, mask)
    weights = importer.emit(relax.op.nn.softmax(scores, -1))
    if blocked is not None:  # else such a row would be 0 / 0
        zero = relax.const(0.0, dtype_of(weights))
        weights = importer.emit(relax.op.where(blocked, zero, weights))
    return relax.op.matmul(weights, v)


def _masked(
    importer: Importer, scores: relax.Expr, mask: Any
) -> tuple[relax.Expr, relax.Expr | None]:
    """Return the masked scores, and which rows have no key to attend to, if there may be any."""
    if mask is None:
        return scores, None
    constant = constant_of(importer.program, mask)
    infinity = _minus_infinity(scores)
    if mask.meta["val"].dtype is torch.bool:
        if constant is not None and bool(constant.all()):
            return scores, None
        allowed = importer.tensor(mask)
        scores = importer.emit(relax.op.where(allowed, scores, infinity))
        if constant is not None and bool(constant.any(-1).all()):
            return scores, None
        some = importer.emit(relax.op.max(relax.op.astype(allowed, "int8"), [-1], True))
        return scores, importer.emit(relax.op.equal(some, relax.const(0, "int8")))
    bias = importer.tensor(mask, _dtype(scores))
    scores = importer.emit(relax.op.add(scores, bias))
    if constant is not None and not bool((constant == -math.inf).all(-1).any()):
        return scores, None
    best = importer.emit(relax.op.max(bias, [-1], True))
    return scores, importer.emit(relax.op.equal(best, infinity))


def _share_heads(importer: Importer, x: relax.Expr, heads: int) -> relax.Expr:
    """Repeat each head of keys or values for the group of query heads that share it."""
    shared = int(x.ty.shape[-3])
    if shared == heads:
        return x
    return importer.emit(relax.op.repeat(x, heads // shared, axis=len(x.ty.shape) - 3))


def _times(importer: Importer, x: relax.Expr, factor: float) -> relax.Expr:
    if factor == 1.0:
        return x
    return importer.emit(relax.op.multiply(x, relax.const(float(factor), dtype_of(x))))


def _minus_infinity(like: relax.Expr) -> relax.Expr:
    return relax.const(-math.inf, dtype_of(like))


def _dtype(x: relax.Expr) -> torch.dtype:
    return getattr(torch, dtype_of(x))
