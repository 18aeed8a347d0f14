"""PyTorch's transformer layers, which call special operators in evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.programs import executed, is_fused, target
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.artifact import Artifact
from tvmify.capture import capture
from tvmify.compiler import compile
from tvmify.compiler.frontend.fast_paths import multi_head_attention

WIDTH, HEADS = 32, 4


def checked(module: nn.Module, *args: Any) -> Artifact:
    """Check a module without gradients: on its fast path, captured by TorchScript."""
    module = module.eval()
    with torch.inference_mode():
        program = capture(module, args, {})
        assert program.method == "torchscript", program.reason
        artifact = compile(program.export(args, {}), target())
        result = executed(artifact, module, *args)
        assert_close_to_reference(result, module, args)
    assert not artifact.report["bridged"]
    assert artifact.report["unscheduled"] == 0
    return artifact


class Attention(nn.Module):
    def __init__(self, need_weights: bool = False, average: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights
        self.average = average

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.attention(
            q,
            k,
            v,
            key_padding_mask=padding,
            attn_mask=mask,
            need_weights=self.need_weights,
            average_attn_weights=self.average,
        )


def padding() -> Tensor:
    hidden = torch.zeros(3, 10, dtype=torch.bool)
    hidden[1, 6:] = True
    return hidden


MASKS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "none": (None, None),
    "padding": (padding(), None),
    "causal": (None, torch.ones(10, 10, dtype=torch.bool).triu(1)),
    "both": (padding(), torch.ones(10, 10, dtype=torch.bool).triu(1)),
    "floats": (None, torch.full((10, 10), float("-inf")).triu(1)),
}


@pytest.mark.parametrize("masks", MASKS)
def test_self_attention(masks: str):
    x = torch.randn(3, 10, WIDTH)
    assert is_fused(checked(Attention(), x, x, x, *MASKS[masks]))


def test_attention_to_others():
    q, k = torch.randn(3, 10, WIDTH), torch.randn(3, 10, WIDTH)
    assert is_fused(checked(Attention(), q, k, k, None, None))
    assert is_fused(checked(Attention(), q, k, torch.randn(3, 10, WIDTH), padding(), None))


@pytest.mark.parametrize("average", [True, False])
def test_requested_attention_weights(average: bool):
    x = torch.randn(3, 10, WIDTH)
    artifact = checked(Attention(need_weights=True, average=average), x, x, x, padding(), None)
    assert not is_fused(artifact)


@pytest.mark.parametrize(("norm_first", "activation"), [(True, "relu"), (False, "gelu")])
def test_encoder_layer(norm_first: bool, activation: str):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 64, activation=activation, norm_first=norm_first, batch_first=True
    )
    artifact = checked(layer, torch.randn(3, 10, WIDTH))
    rules = [rule for name, rule in artifact.report["kernels"].items() if "pack" not in name]
    assert rules.count("attention") == 1
    assert rules.count("matmul") == 4


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


@pytest.mark.parametrize("masks", ["padding", "causal", "both"])
def test_encoder(masks: str):
    """The layer checks whether the mask is causal; a program does not need to know."""
    assert is_fused(checked(Encoder(2), torch.randn(3, 10, WIDTH), *MASKS[masks]))


@pytest.mark.thorough
def test_decoder():
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True)
    x, mask = torch.randn(3, 10, WIDTH), MASKS["floats"][1]
    assert is_fused(checked(nn.TransformerDecoder(layer, 2), x, torch.randn(3, 7, WIDTH), mask))


def test_program_for_a_causal_mask_accepts_other_masks():
    module = Encoder(2).eval()
    encoder = tvmify(module, cache=False)
    x = torch.randn(3, 10, WIDTH)
    with torch.inference_mode():
        for mask in (MASKS["floats"][1], torch.randn(10, 10)):
            assert_close_to_reference(encoder(x, None, mask), module, (x, None, mask))
    assert encoder.cache_info().builds == 1


def operands(hidden: Tensor | None, mask_type: int | None) -> tuple[Any, ...]:
    x = torch.randn(3, 10, WIDTH)
    qkv, out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    weights = (qkv.weight.detach(), qkv.bias.detach(), out.weight.detach(), out.bias.detach())
    return (x, x, x, WIDTH, HEADS, *weights, hidden, True, False, mask_type)


@pytest.mark.parametrize(
    ("mask_type", "shape"), [(0, (10, 10)), (1, (3, 10)), (2, (3, HEADS, 10, 10))]
)
def test_masks_hide_the_same_positions_as_pytorch(mask_type: int, shape: tuple[int, ...]):
    hidden = torch.rand(shape) > 0.6
    hidden[0] = True  # PyTorch gives NaN for a query with all keys hidden
    args = operands(hidden, mask_type)
    expected = torch._native_multi_head_attention(*args)
    for got, want in zip(multi_head_attention(*args), expected, strict=True):
        assert got is not None
        assert want.isnan().any()
        torch.testing.assert_close(got, want, equal_nan=True)
