"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax

from tvmify.compiler.constants import constant_of
from tvmify.compiler.converters.reduction import multiplier
from tvmify.compiler.converters.registry import converts
from tvmify.compiler.passes.lower_attention import describe
from tvmify.compiler.spelt_attention import EMPTY

if TYPE_CHECKING:
    from tvmify.compiler.importer import Importer


@converts("scaled_dot_product_attention.default")
def attention(importer: Importer, node: fx.Node) -> relax.Expr:
    """``softmax(q kᵀ scale + mask) v``.

    Rows that no key may attend to give zeros, as in eager's fused CPU kernel and in its own
    softmax for attention; but NaN where the model spelt attention out.
    """
    query, key, value = node.args[:3]
    mask = importer.argument(node, 3, "attn_mask")
    causal = bool(importer.argument(node, 5, "is_causal", False))
    scale = node.kwargs.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(importer.shape(query)[-1])
    shape = importer.shape(node)
    lead = (1, 1, *shape[:-2])
    batch, heads = (math.prod(lead[:-1]), lead[-1])
    dtype = multiplier(node.meta["val"].dtype)

    def operand(x: Any) -> relax.Expr:
        tensor = importer.tensor(x, dtype)
        *own, length, size = importer.shape(x)
        shared = bool(node.kwargs.get("enable_gqa", False)) and bool(own)
        outer = [*shape[:-3], own[-1]] if shared else list(shape[:-2])
        if own != outer:
            tensor = importer.emit(relax.op.broadcast_to(tensor, [*outer, length, size]))
        own_heads = own[-1] if shared else heads
        return _reshaped(importer, tensor, [batch, own_heads, length, size])

    q, k, v = (operand(x) for x in (query, key, value))
    if mask is not None and _is_causal(importer, mask, node):
        mask, causal = None, True
    bias = None
    if mask is not None and not _is_neutral(importer, mask):
        bias = _mask(importer, mask, dtype, lead)
    empty = node.meta.get(EMPTY, 0.0)
    call = describe(q, k, v, bias, scale=float(scale), causal=causal, empty=empty)
    return relax.op.reshape(importer.emit(call), list(shape)) if len(shape) != 4 else call


def _reshaped(importer: Importer, x: relax.Expr, shape: list[int]) -> relax.Expr:
    if [int(extent) for extent in x.ty.shape.values] == shape:
        return x
    return importer.emit(relax.op.reshape(x, shape))


def _mask(
    importer: Importer, mask: fx.Node, dtype: torch.dtype, lead: tuple[int, ...]
) -> relax.Expr:
    """Return a mask with four axes, each of which may be 1."""
    mask = _narrowest(importer, mask)
    is_bool = mask.meta["val"].dtype is torch.bool
    tensor = importer.tensor(mask) if is_bool else importer.tensor(mask, dtype)
    *outer, queries, keys = (1, 1, 1, 1, *importer.shape(mask))[-max(4, len(lead) + 2) :]
    if any(extent != 1 for extent in outer[:-1]) and len(lead) > 4:
        outer = [1] * (len(lead) - len(outer)) + outer
        full = [*lead[:-1], outer[-1], queries, keys]
        tensor = importer.emit(relax.op.broadcast_to(tensor, full))
        outer = full[:-2]
    return _reshaped(importer, tensor, [math.prod(outer[:-1]), outer[-1], queries, keys])


def _narrowest(importer: Importer, mask: fx.Node) -> fx.Node:
    """Return what a mask was made of by broadcasting, or by "and" with what is true throughout."""
    name = str(mask.target)
    if name in ("aten.expand.default", "aten.clone.default"):
        return _narrowest(importer, mask.all_input_nodes[0])
    if name in ("aten.bitwise_and.Tensor", "aten.logical_and.default"):
        parts = [part for part in mask.all_input_nodes if not _is_neutral(importer, part)]
        if len(parts) == 1 and parts[0].meta["val"].dtype is torch.bool:
            return _narrowest(importer, parts[0])
    return mask


def _is_neutral(importer: Importer, mask: fx.Node) -> bool:
    """Whether a mask is known to hide nothing."""
    constant = constant_of(importer.program, mask)
    if constant is None:
        return False
    return bool(constant.all()) if constant.dtype is torch.bool else not bool(constant.any())


def _is_causal(importer: Importer, mask: fx.Node, node: fx.Node) -> bool:
    """Whether a mask is known to show each query the keys up to its own place, and no others."""
    constant = constant_of(importer.program, mask)
    if constant is None:
        return False
    if constant.dtype is not torch.bool:
        lowest = torch.finfo(constant.dtype).min
        if not bool(((constant == 0) | (constant <= lowest)).all()):
            return False
        constant = constant == 0
    queries, keys = importer.shape(node.args[0])[-2], importer.shape(node.args[1])[-2]
    lower = torch.ones(queries, keys, dtype=torch.bool).tril()
    return constant.shape[-2:] == lower.shape and bool((constant == lower).all())
