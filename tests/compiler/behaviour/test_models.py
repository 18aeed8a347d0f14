"""Whole networks against eager and float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compiler.programs import check

transformers = pytest.importorskip("transformers")


class Logits(nn.Module):
    """The first tensor of the result of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs, return_dict=False)[0]


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}


@pytest.mark.parametrize("padded", [0, 5])
def test_bert(padded: int):
    config = transformers.BertConfig(intermediate_size=64, **TINY)
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, 16 - padded :] = 0
    model = Logits(transformers.BertModel(config).eval())
    check(model, input_ids=torch.randint(0, 100, (1, 16)), attention_mask=mask)


def test_gpt2():
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=100, use_cache=False
    )
    model = Logits(transformers.GPT2LMHeadModel(config).eval())
    check(model, input_ids=torch.randint(0, 100, (1, 16)))


def test_llama():
    config = transformers.LlamaConfig(
        intermediate_size=64, num_key_value_heads=1, use_cache=False, **TINY
    )
    model = Logits(transformers.LlamaForCausalLM(config).eval())
    check(model, input_ids=torch.randint(0, 100, (1, 16)))
