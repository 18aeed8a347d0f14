"""Shapes of operators that PyTorch cannot record without a kernel that computes them."""

from __future__ import annotations

from typing import Any

import torch

_ENCODER_LAYER = "aten::_transformer_encoder_layer_fwd"


def add_missing() -> None:
    """Add the fast path of ``nn.TransformerEncoderLayer``, which PyTorch 2.11 lacks."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_ENCODER_LAYER, "Meta"):
        torch.library.register_fake(_ENCODER_LAYER, _same_shape)


def _same_shape(src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(src)
