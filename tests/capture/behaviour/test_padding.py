"""Padding masks in PyTorch's attention layers, whose fast paths check for gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tvmify import tvmify

PADDED = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()


class Attention(nn.Module):
    def __init__(self, batch_first: bool, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)
        self.weights = weights

    def forward(self, x, mask):
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=self.weights)[0]


class Layer(nn.Module):
    def __init__(self, norm_first: bool, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            16, 4, 32, batch_first=batch_first, norm_first=norm_first
        )

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)


class Recorded(Layer):
    def forward(self, x, mask, *rest):  # TorchScript refuses star arguments
        return self.layer(x, src_key_padding_mask=mask)


class Encoder(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (lambda: Attention(True, True), torch.no_grad),
        (lambda: Attention(True, True), torch.enable_grad),
        (lambda: Attention(True, False), torch.inference_mode),
        (lambda: Attention(False, False), torch.no_grad),
        (lambda: Layer(True, True), torch.no_grad),
        (lambda: Layer(True, True), torch.enable_grad),
        (lambda: Layer(False, False), torch.inference_mode),
        (lambda: Recorded(False, True), torch.no_grad),
        (lambda: Encoder(True), torch.no_grad),
        (lambda: Encoder(True), torch.enable_grad),
        (lambda: Encoder(True), torch.inference_mode),
        (lambda: Encoder(False), torch.no_grad),
    ],
)
def test_attention_of_padding_alone_is_nan_where_it_is_in_eager(make, mode) -> None:
    torch.manual_seed(0)
    net = make().eval()
    fast = tvmify(net, cache=False, compare=False)
    x = torch.randn(2, 5, 16)
    first = next(m for m in net.modules() if isinstance(m, nn.MultiheadAttention)).batch_first
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mask in (PADDED, torch.zeros(2, 5).bool(), None):
            given = x if first else x.transpose(0, 1).contiguous()
            expected, got = net(given, mask), fast(given, mask)
            torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
