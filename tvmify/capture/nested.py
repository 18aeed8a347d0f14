"""The nested tensors of ``nn.TransformerEncoder``, which neither way of capturing can record.

In evaluation mode without gradients, it packs right-padded sequences into a nested tensor, and
fills the padding with zeros at the end. Whether they are padded on the right depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.transformer import _detect_is_causal_mask, _get_seq_len

from tvmify.errors import CaptureError


def refuse_nested_tensor(*_: Any) -> NoReturn:
    """Stand in for the operator that makes a nested tensor."""
    raise CaptureError(
        "nn.TransformerEncoder makes a nested tensor of right-padded sequences",
        "Construct it with enable_nested_tensor=False; padded positions are not zeroed then.",
    )


def avoid_nested_tensors(module: nn.Module) -> None:
    """Make the encoders of a twin compute the same without nested tensors.

    Other classes, which may look at the nested tensor, are left alone.
    """
    for part in module.modules():
        if _nests(part) and type(part) is nn.TransformerEncoder and part.mask_check:
            layers = list(part.layers)
            if all(type(layer) is nn.TransformerEncoderLayer for layer in layers):
                part.__class__ = PaddedEncoder


def refuse_nested_tensors(module: nn.Module) -> None:
    """Make the other encoders of a twin raise where they would make a nested tensor."""
    for part in module.modules():
        if _nests(part) and not isinstance(part, PaddedEncoder):
            part.forward = partial(_checked, part, part.forward)


def _nests(part: nn.Module) -> TypeGuard[nn.TransformerEncoder]:
    return isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False)


class PaddedEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder`` with masks in place of nested tensors; TorchScript compiles it."""

    if TYPE_CHECKING:
        layers: Any

    def forward(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        """Encode sequences."""
        padding = F._canonical_mask(
            mask=src_key_padding_mask,
            mask_name="src_key_padding_mask",
            other_type=F._none_or_dtype(mask),
            other_name="mask",
            target_type=src.dtype,
        )
        mask = F._canonical_mask(
            mask=mask,
            mask_name="mask",
            other_type=None,
            other_name="",
            target_type=src.dtype,
            check_other=False,
        )
        zeroed: torch.Tensor | None = None
        if padding is not None and mask is None and src.dim() == 3 and not self._is_slow(src):
            hidden = padding != 0
            place = torch.arange(hidden.size(1), device=hidden.device)
            padded_right = (place >= torch.logical_not(hidden).sum(1, keepdim=True)) == hidden
            zeroed = hidden & padded_right.all()
            padding = padding.masked_fill(zeroed, float("-inf"))
        length = _get_seq_len(src, self.layers[0].self_attn.batch_first)
        is_causal = _detect_is_causal_mask(mask, is_causal, length)
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=mask, is_causal=is_causal, src_key_padding_mask=padding)
        if zeroed is not None:
            output = output.masked_fill(zeroed.unsqueeze(-1), 0.0)
        if self.norm is not None:
            output = self.norm(output)
        return output

    def _is_slow(self, src: torch.Tensor) -> bool:
        """Whether eager does not take its fast path, and so makes no nested tensor."""
        first = self.layers[0]
        if first.training or torch.is_autocast_enabled():
            return True
        if not torch.backends.mha.get_fastpath_enabled():
            return True
        if torch.is_grad_enabled():
            for tensor in (
                src,
                first.self_attn.in_proj_weight,
                first.self_attn.in_proj_bias,
                first.self_attn.out_proj.weight,
                first.self_attn.out_proj.bias,
                first.norm1.weight,
                first.norm1.bias,
                first.norm2.weight,
                first.norm2.bias,
                first.linear1.weight,
                first.linear1.bias,
                first.linear2.weight,
                first.linear2.bias,
            ):
                if tensor.requires_grad:
                    return True
        return False


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
