"""Steps with a `DynamicCache` write in place; other references to its tensors see no change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.decorate.test_caches import small
from tvmify import tvmify as decorate

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by transformers
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [5, 7, 9, 11, 13]])


@pytest.fixture(scope="module")
def networks() -> Any:
    network = small(pytest.importorskip("transformers"))
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    return network, fast


class Talk:
    """A network and its cache; every step checks the result against eager's."""

    def __init__(self, networks: Any) -> None:
        transformers: Any = pytest.importorskip("transformers")

        self.networks = networks
        self.caches = [transformers.DynamicCache() for _ in networks]
        self.say(TOKENS)

    def say(self, tokens: torch.Tensor) -> None:
        with torch.no_grad():
            eager, fast = (
                run(tokens, past_key_values=cache).logits
                for run, cache in zip(self.networks, self.caches, strict=True)
            )
        torch.testing.assert_close(fast, eager)
        torch.testing.assert_close(*(cache.layers[0].keys for cache in reversed(self.caches)))
        torch.testing.assert_close(*(cache.layers[0].values for cache in reversed(self.caches)))

    def step(self) -> None:
        self.say(TOKENS[:, :1])

    @property
    def keys(self) -> torch.Tensor:
        return self.caches[1].layers[0].keys


def test_steps_copy_only_new_rows(networks: Any) -> None:
    talk = Talk(networks)
    talk.step()
    places = {talk.keys.data_ptr()}
    for _ in range(3):
        talk.step()
        places.add(talk.keys.data_ptr())
    assert len(places) == 1
    assert talk.keys.shape[2] == 9


def test_a_full_room_is_left_for_a_larger_one(
    networks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmify.decorate.rooms._LEAST_SPARE", 3)
    talk, places = Talk(networks), set()
    for _ in range(6):
        talk.step()
        places.add(talk.keys.data_ptr())
    assert len(places) == 3


def test_kept_tensor_has_its_own_memory(networks: Any) -> None:
    talk = Talk(networks)
    talk.step()
    kept = [cache.layers[0].keys for cache in talk.caches]
    row = talk.caches[1].layers[0].values[:, :, 5]
    before = row.clone()
    talk.step()
    torch.testing.assert_close(kept[1], kept[0])
    assert torch.equal(row, before)
    kept[1].zero_()
    row.zero_()
    talk.step()


CHANGES: dict[str, Callable[[Any], object]] = {
    "fewer tokens": lambda cache: cache.crop(-2),
    "other beams": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "other values": lambda cache: cache.layers[0].keys.mul_(2),
    "a prompt": lambda cache: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_follow_changes_of_the_cache(networks: Any, change: str) -> None:
    talk = Talk(networks)
    talk.step()
    for cache in talk.caches:
        CHANGES[change](cache)
    if change == "a prompt":
        talk.say(TOKENS)
    talk.step()
    talk.step()


def test_two_continuations_of_one_cache(networks: Any) -> None:
    first = Talk(networks)
    first.step()
    second = copy.copy(first)
    second.caches = [copy.copy(cache) for cache in first.caches]
    for cache in second.caches:
        cache.layers = [copy.copy(layer) for layer in cache.layers]
    first.step()
    second.say(TOKENS[:, 1:2])
    first.step()
    second.say(TOKENS[:, 2:3])
    first.step()


def test_inference_tensors_are_written_in_their_mode_only(networks: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")

    _, fast = networks
    with torch.no_grad():
        cache = transformers.DynamicCache()
        fast(TOKENS, past_key_values=cache)
    places = set()
    for _ in range(2):
        with torch.inference_mode():
            fast(TOKENS[:, :1], past_key_values=cache)
        places.add(cache.layers[0].keys.data_ptr())
    assert len(places) == 1
    with torch.no_grad():  # tensors of inference mode cannot be written outside of it
        fast(TOKENS[:, :1], past_key_values=cache)
    assert cache.layers[0].keys.data_ptr() not in places
    assert cache.get_seq_length() == 8


def test_attentions_have_a_column_for_each_token(networks: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")

    network = copy.deepcopy(networks[0])
    network.set_attn_implementation("eager")
    fast = decorate(copy.deepcopy(network), cache=False, on_miss="eager")
    with torch.no_grad():
        cache = transformers.DynamicCache()
        fast(TOKENS, past_key_values=cache)
        found = fast(TOKENS[:, :1], past_key_values=cache, output_attentions=True)
    assert found.attentions[0].shape == (2, 4, 1, 6)


def test_model_failing_with_room_runs_without(networks: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")

    config = transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)
    network = transformers.BloomForCausalLM(config).eval()
    fast = decorate(copy.deepcopy(network), cache=False, on_miss="eager")
    given = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 4}
    given |= {"do_sample": False, "eos_token_id": None}
    assert torch.equal(fast.generate(**given), network.generate(**given))


def test_model_compiled_in_parts_with_room_runs_without() -> None:
    transformers: Any = pytest.importorskip("transformers")

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    config = transformers.OPTConfig(vocab_size=32, num_attention_heads=2, **sizes)
    network = transformers.OPTForCausalLM(config).eval()
    fast = decorate(copy.deepcopy(network), cache=False, compare=False)
    given = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    assert torch.equal(fast.generate(TOKENS, **given), network.generate(TOKENS, **given))
    assert "by regions" not in str(fast.explain())
    # the prompt, and all steps but the first
    assert fast.cache_info().builds == 2
