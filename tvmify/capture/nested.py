"""The nested tensors of ``nn.TransformerEncoder``, which it hides from ``torch.export``.

In evaluation mode without gradients, it packs right-padded sequences into a nested tensor and
zeroes the padding at the end, but not while ``torch.export`` records.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from tvmify.errors import CaptureError


def refuse_nested_tensor(*_: Any) -> NoReturn:
    """Stand in for the operator that makes a nested tensor."""
    raise CaptureError(
        "nn.TransformerEncoder makes a nested tensor of right-padded sequences",
        "Construct it with enable_nested_tensor=False; padded positions are not zeroed then.",
    )


def refuse_nested_tensors(module: nn.Module) -> None:
    """Make the encoders of a twin raise where they would make a nested tensor."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False):
            part.forward = partial(_checked, part, part.forward)


def _checked(
    encoder: nn.TransformerEncoder,
    forward: Callable[..., Any],
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    padded = src_key_padding_mask is not None and mask is None and src.dim() == 3
    layer: Any = encoder.layers[0]
    tensors = (src, *layer.parameters())
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if padded and not layer.training and not differentiable:
        refuse_nested_tensor()
    return forward(src, mask, src_key_padding_mask, is_causal)
