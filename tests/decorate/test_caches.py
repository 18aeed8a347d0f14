"""Caches of transformers as arguments: flattened, restored, and used in generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tvmify import tvmify as decorate
from tvmify.decorate.caches import GrowingCache, take_apart

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by transformers


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def small(transformers: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)).eval()
    for weight in network.parameters():  # so that every token depends on all before it
        torch.nn.init.normal_(weight, std=0.2)
    return network


def prompts(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, 96, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    tokens[1, :3] = mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def test_compiled_generation_matches_eager(transformers: Any) -> None:
    network = small(transformers)
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    for length in (7, 9, 20, 8):
        given = prompts(length) | {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(fast.generate(**given), network.generate(**given))
    # The first prompt, prompts of any length, and a step after any number of tokens.
    assert fast.cache_info().builds == 3
    assert fast.cache_info().eager == 0


def tiny(transformers: Any, name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **tokens)
    config.sliding_window = None
    network = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return network


@pytest.mark.thorough
def test_static_caches_of_any_size_share_a_program(transformers: Any) -> None:
    network = tiny(transformers, "Qwen3")
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    for length, more in ((7, 4), (9, 5), (20, 3)):
        given = prompts(length) | {"max_new_tokens": more, "do_sample": False}
        given |= {"cache_implementation": "static"}
        assert torch.equal(fast.generate(**given), network.generate(**given))
    # The first prompt, prompts of any length, and a step with a cache of any size.
    assert fast.cache_info().builds == 3
    assert fast.cache_info().eager == 0


def test_static_cache_is_written_in_place(transformers: Any) -> None:
    network = tiny(transformers, "Llama")
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    layers, tokens = [], torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for run in (network, fast):
            cache = transformers.StaticCache(config=network.config, max_cache_len=16)
            run(tokens, past_key_values=cache)
            (layer,) = cache.layers
            before = [part.data_ptr() for part in (layer.keys, layer.values)]
            for place in (3, 4):
                at = {"position_ids": torch.tensor([[place]])}
                run(tokens[:, :1], past_key_values=cache, **at)
            assert [part.data_ptr() for part in (layer.keys, layer.values)] == before
            layers.append(layer)
    assert layers[1].max_cache_len == 16
    assert layers[1].cumulative_length == layers[0].cumulative_length == 5
    torch.testing.assert_close(layers[1].keys, layers[0].keys)
    torch.testing.assert_close(layers[1].values, layers[0].values)


def test_cache_info_does_not_change_the_module(transformers: Any) -> None:
    fast = decorate(small(transformers), cache=False, compare=False, dynamic=False)
    with torch.no_grad():
        fast(**prompts(5), past_key_values=transformers.DynamicCache())
    before = set(vars(fast))
    assert fast.cache_info().builds == 1
    assert set(vars(fast)) == before


def test_cache_contents_match_eager(transformers: Any) -> None:
    network = small(transformers)
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    given = prompts(5)
    caches = [transformers.DynamicCache(config=network.config) for _ in (network, fast)]
    layers = [cache.layers[0] for cache in caches]
    with torch.no_grad():
        results = [
            run(**given, past_key_values=cache)
            for run, cache in zip((network, fast), caches, strict=True)
        ]
    assert results[1].past_key_values is caches[1]
    assert list(results[1]) == list(results[0])
    assert caches[1].layers[0] is layers[1]
    assert caches[1].get_seq_length() == 5
    torch.testing.assert_close(layers[1].keys, layers[0].keys)
    torch.testing.assert_close(layers[1].values, layers[0].values)


@pytest.mark.thorough
def test_generation_with_a_sliding_window(transformers: Any) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "sliding_window": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.MistralConfig(**sizes, **heads, **tokens)
    network = transformers.MistralForCausalLM(config).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    for length in (5, 4, 6):
        given = prompts(length) | {"max_new_tokens": 7, "do_sample": False}
        assert torch.equal(fast.generate(**given), network.generate(**given))
    # The first prompt and prompts of any length; steps until the window is full, two programs for
    # the step that fills it, and steps after it.
    assert fast.cache_info().builds == 6
    assert fast.cache_info().eager == 0


def test_token_counts_advance(transformers: Any) -> None:
    layers = transformers.cache_utils
    cache = layers.DynamicCache()
    cache.layers.append(layers.DynamicSlidingWindowLayer(sliding_window=4))
    states = torch.zeros(1, 2, 3, 8)
    for length in (3, 6):
        cache.update(states, states, 0)
        opened = take_apart(cache)
        assert opened is not None
        assert [tensor.shape for tensor in opened.tensors if tensor.dim() == 1] == [(length,)]
        assert cache.get_seq_length() == length


def test_unsupported_caches_are_left_alone(transformers: Any) -> None:
    layers = transformers.cache_utils
    plain = layers.DynamicCache()
    module = torch.nn.Identity()
    assert GrowingCache.among(module, (), {"past_key_values": plain, "other": plain}) is None
    assert GrowingCache.among(module, (), {"x": 1}) is None
    plain.note = "text of the user's"
    assert take_apart(plain) is None


def test_description_ignores_tensor_values(transformers: Any) -> None:
    def cache(length: int) -> Any:
        states = torch.randn(1, 4, length, 8)
        return transformers.DynamicCache([(states, states + 1)])

    first, second = take_apart(cache(3)), take_apart(cache(5))
    assert first is not None and second is not None
    assert first.description == second.description
    assert [tensor.shape[2] for tensor in second.tensors] == [5, 5]
