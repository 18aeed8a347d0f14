"""The fast paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``. In evaluation
mode these modules call a single operator of PyTorch, their "fast path". Here it is decomposed into
operators that are compiled like those of any other model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

#: The ``mask_type`` of a mask ``[batch, keys]``; other masks broadcast to the scores.
_OF_KEYS = 1


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``aten::_native_multi_head_attention`` of tensors ``[batch, places, embed_dim]``.

    Returns
    -------
    tuple
        The result, like `query`, and the weights ``[batch, heads, queries, keys]``, or their mean
        over the heads; None without `need_weights`.
    """

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)

    if key is query and value is query:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        own = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        projected = tuple(F.linear(*part) for part in own)
    q, k, v = (heads(x) for x in projected)
    scores = q @ k.transpose(-1, -2) * (embed_dim // num_head) ** -0.5
    if mask is not None:
        hidden = mask.bool()
        if mask_type == _OF_KEYS:
            hidden = hidden[:, None, None, :]
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    result = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def transformer_encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """``aten::_transformer_encoder_layer_fwd`` of a tensor ``[batch, places, embed_dim]``."""

    def norm(x: torch.Tensor, *weight_and_bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), *weight_and_bias, eps)

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        masking: Any = (mask, False, True, mask_type)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *projections, *masking)[0]

    def feed(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else inner.relu(), ffn_weight_2, ffn_bias_2)

    first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
    if norm_first:
        x = src + attend(norm(src, *first))
        return x + feed(norm(x, *second))
    x = norm(src + attend(src), *first)
    return norm(x + feed(x), *second)
