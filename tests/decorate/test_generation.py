"""Other modules that ``generate`` of transformers calls run compiled, too."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import tvmify as decorate

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by transformers


@pytest.fixture
def network() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    tokens = {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes, **tokens, num_heads=2)
    network = transformers.T5ForConditionalGeneration(config).eval()
    for weight in network.parameters():  # so that every token depends on the whole text
        torch.nn.init.normal_(weight, std=0.3)
    return network


def text(length: int) -> dict[str, Any]:
    tokens = torch.randint(3, 64, (2, length))
    mask = torch.ones_like(tokens)
    tokens[0, :2] = mask[0, :2] = 0
    return {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}


@pytest.mark.thorough
def test_encoder_is_compiled(network: Any) -> None:
    fast = decorate(copy.deepcopy(network), cache=False, compare=False, strict=True)
    for length in (7, 9, 20):
        given = text(length)
        assert torch.equal(fast.generate(**given), network.generate(**given))
    plain, _ = fast.explain().methods
    (encoder,) = plain.parts
    assert encoder.name.endswith(".encoder")
    assert {signature.runs for signature in encoder.signatures} == {"compiled"}
    assert encoder.info.builds == 2  # for the first length, and for any
    builds = fast.cache_info().builds
    # Weights may change, and modules be replaced.
    for one in (network, fast):
        one.encoder.final_layer_norm.weight.data.mul_(2)
    assert torch.equal(fast.generate(**given), network.generate(**given))
    assert fast.cache_info().builds == builds
    torch.nn.init.normal_(network.encoder.block[0].layer[0].SelfAttention.q.weight)
    fast.encoder = copy.deepcopy(network.encoder)
    assert torch.equal(fast.generate(**given), network.generate(**given))
    assert fast.cache_info().eager == 0


def test_generate_calls_hooks_of_the_decorated_object(network: Any) -> None:
    fast = decorate(network, on_miss="eager")
    calls: list[Any] = []
    fast.register_forward_hook(lambda *given: calls.append(given))
    fast.generate(**text(7))
    assert len(calls) == 5  # one for each token


def test_generate_calls_an_overridden_forward(network: Any) -> None:
    calls: list[Any] = []

    class Counting(decorate(type("T5", (type(network),), {}), on_miss="eager")):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs)
            return super().forward(*args, **kwargs)

    given = text(7)
    fast = Counting(network.config).eval()
    fast.load_state_dict(network.state_dict())
    assert torch.equal(fast.generate(**given), network.generate(**given))
    assert len(calls) == 5


def test_module_is_freed_after_generation(network: Any) -> None:
    fast = decorate(network, on_miss="eager")
    fast.generate(**text(7))
    alive = weakref.ref(fast)
    del fast
    gc.collect()
    assert alive() is None


def test_decoder_that_generates_by_itself_is_compiled() -> None:
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    layers |= {"intermediate_size": 32, "projection_dim": 8}
    texts = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = transformers.BlipConfig(
        text_config=layers | texts | {"pad_token_id": 0, "encoder_hidden_size": 16},
        vision_config=layers | {"image_size": 32, "patch_size": 16},
    )
    network = transformers.BlipForConditionalGeneration(config).eval()
    fast: Any = decorate(network, cache=False, compare=False)
    for tokens in (3, 6):
        given = {"pixel_values": torch.randn(1, 3, 32, 32), "max_new_tokens": tokens}
        assert torch.equal(fast.generate(**given), network.generate(**given))
    (method,) = fast.explain().methods
    names = [part.name.removeprefix("BlipForConditionalGeneration.") for part in method.parts]
    assert names == ["vision_model", "text_decoder with a cache"]
    runs = {signature.runs for part in method.parts for signature in part.signatures}
    assert runs == {"compiled"}
    assert fast.cache_info().eager == 0


class Wrapper(nn.Module):
    """Calls ``generate`` of an inner model through another module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"lm": network})

    def forward(self, **kwargs: Any) -> Any:
        return self.inner["lm"](**kwargs)

    def generate(self, **kwargs: Any) -> Any:
        return self.inner["lm"].generate(**kwargs)


@pytest.fixture
def decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return network


@pytest.mark.thorough
def test_inner_model_that_generates_is_compiled(decoder: Any) -> None:
    fast = decorate(Wrapper(decoder).eval(), cache=False, compare=False, strict=True)
    for length in (7, 9, 20):
        given = text(length)
        assert torch.equal(fast.generate(**given), decoder.generate(**given))
    info = fast.cache_info()
    assert info.eager == 0
    assert info.builds == info.entries == 3  # the first prompt, any prompt, and steps
    (method,) = fast.explain().methods
    assert [part.name for part in method.parts] == ["Wrapper.inner.lm with a cache"]
    given["use_cache"] = False
    assert torch.equal(fast.generate(**given), decoder.generate(**given))
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} >= {"Wrapper.inner.lm"}
    # Weights may change, and the inner model be replaced.
    torch.nn.init.normal_(decoder.transformer.wte.weight)
    assert torch.equal(fast.generate(**given), decoder.generate(**given))
    fast.inner["lm"] = other = copy.deepcopy(decoder)
    other.transformer.wte.weight.data.mul_(-1)
    assert torch.equal(fast.generate(**given), other.generate(**given))
    assert not [name for name in vars(decoder) if "tvmify" in name]


@pytest.mark.thorough
def test_inner_encoder_of_a_generating_model_is_compiled(network: Any) -> None:
    fast = decorate(Wrapper(network).eval(), cache=False, compare=False, strict=True)
    given = text(7)
    assert torch.equal(fast.generate(**given), network.generate(**given))
    (method,) = fast.explain().methods
    names = {part.name.removeprefix("Wrapper.inner.lm") for part in method.parts}
    assert names == {".encoder", " with a cache"}
    assert fast.cache_info().eager == 0


def test_other_methods_of_this_name_stay_as_they_are() -> None:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def generate(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
            return self(x), type(self) is Sampler

    fast = decorate(Sampler, cache=False, compare=False, strict=True)().eval()  # type: ignore[call-arg]
    with torch.no_grad():
        x = torch.randn(2, 4)
        result, is_itself = fast.generate(x)
        assert is_itself
        torch.testing.assert_close(result, x @ fast.linear.weight.T + fast.linear.bias)
    assert fast.cache_info().builds == 1
