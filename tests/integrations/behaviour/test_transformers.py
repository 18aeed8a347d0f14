"""Models of transformers under ``torch.compile(backend="tvmify")``."""

from __future__ import annotations

import copy
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


def gpt2(transformers: Any) -> Any:
    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    )


@torch.no_grad()
def test_second_program_serves_all_later_lengths() -> None:
    model = bert(pytest.importorskip("transformers")).eval()
    fast = torch.compile(model, backend="tvmify", options={"strict": True})
    for length in (12, 9, 14, 11):
        tokens = torch.randint(0, 100, (2, length))
        got = fast(tokens)[0]
        assert_close_to_reference(got, lambda tokens: model(tokens)[0], (tokens,))
    info = tvmify.cache_info(fast)
    assert (info.builds, info.eager) == (2, 0)


@pytest.mark.filterwarnings("ignore")  # raised by transformers
@pytest.mark.parametrize(("make", "cache"), [(gpt2, None), (llama, "static")])
def test_generate_builds_two_prompt_and_two_step_programs(make: Any, cache: str | None) -> None:
    torch.manual_seed(0)
    model = make(pytest.importorskip("transformers")).eval()
    for weight in model.parameters():  # so that every token depends on all before it
        torch.nn.init.normal_(weight, std=0.2)
    fast = copy.deepcopy(model)
    fast.forward = torch.compile(fast.forward, backend="tvmify", options={"strict": True})
    for length, more in ((9, 4), (11, 5), (30, 4), (5, 4)):  # prompts of one class of sizes
        given: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        given |= {"input_ids": torch.randint(3, 100, (2, length)), "max_new_tokens": more}
        given |= {"cache_implementation": cache}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][0, :2] = 0  # padding: the mask is an argument of the graphs
        assert torch.equal(fast.generate(**given), model.generate(**given))
    info = tvmify.cache_info(fast.forward)
    assert (info.builds, info.eager) == (4, 0)
