"""Models of transformers under ``torch.compile(backend="tvmify")``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tvmify
from tests.tolerances import assert_close_to_reference

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def bert(transformers: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def llama(transformers: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    )


@pytest.mark.parametrize(("make", "keywords"), [(bert, {}), (llama, {"use_cache": False})])
@torch.no_grad()
def test_one_program_serves_all_lengths_but_the_first(make: Any, keywords: dict[str, Any]) -> None:
    model = make(pytest.importorskip("transformers")).eval()
    fast = torch.compile(model, backend="tvmify", options={"strict": True})
    for length in (12, 9, 14, 11):
        tokens = torch.randint(0, 100, (2, length))
        got = fast(tokens, **keywords)[0]
        assert_close_to_reference(got, lambda tokens: model(tokens, **keywords)[0], (tokens,))
    info = tvmify.cache_info(fast)
    assert (info.builds, info.eager) == (2, 0)
