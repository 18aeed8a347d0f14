"""``nn.TransformerEncoder`` with padding, which eager packs into nested tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tvmify import TvmifyWarning, tvmify

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # eager's own


class Encoder(nn.Module):
    def __init__(self, layer: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer):
        super().__init__()
        torch.manual_seed(0)
        norm = nn.LayerNorm(16)
        nn.init.normal_(norm.bias)
        self.encoder = nn.TransformerEncoder(layer(16, 4, 32, batch_first=True), 2, norm=norm)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class Recorded(Encoder):
    def forward(self, x, padding, *_):  # TorchScript refuses star arguments
        return self.encoder(x, src_key_padding_mask=padding)


class OwnLayer(nn.TransformerEncoderLayer):
    pass


def paddings(length: int) -> list[torch.Tensor]:
    """No padding; padding on the right, of a whole sequence, on the left, and on both sides."""
    places = torch.arange(length)
    limits = [(0, 9), (0, 3), (0, 0), (2, 9), (1, 3)]
    return [((places < a) | (places >= b)).expand(2, -1).clone() for a, b in limits]


@pytest.mark.parametrize("make", [Encoder, Recorded])
def test_padding_on_the_right_is_zeroed_by_the_same_program(make: Any, inference: None) -> None:
    net = make().eval()
    fast: Any = tvmify(make().eval(), strict=True, cache=False)
    x = torch.randn(2, 5, 16)
    for padding in paddings(5):
        padding[0] = torch.arange(5) > 3
        torch.testing.assert_close(fast(x, padding), net(x, padding))
    assert fast.cache_info().builds == 1
    added = torch.zeros(2, 5).masked_fill(paddings(5)[1], -2.0)
    torch.testing.assert_close(fast(x, added), net(x, added))  # eager ignores these positions, too


def test_lengths_of_padded_batches_share_a_program(inference: None) -> None:
    net = Encoder().eval()
    fast: Any = tvmify(Encoder().eval(), strict=True, cache=False)
    for length in (5, 6, 9, 8, 17):
        x, padding = torch.randn(2, length, 16), paddings(length)[1]
        torch.testing.assert_close(fast(x, padding), net(x, padding))
    assert fast.cache_info().builds == 2


def test_layers_that_may_look_at_nested_tensors_get_them(inference: None) -> None:
    net = Encoder(OwnLayer).eval()
    x, padding = torch.randn(2, 5, 16), paddings(5)[1]
    fast: Any = tvmify(net, cache=False)
    with pytest.warns(TvmifyWarning, match="nested tensor"):
        torch.testing.assert_close(fast(x, padding), net(x, padding))
