"""Text generation with models of transformers: prompts of several lengths, greedy, with a cache.

    python -m benchmarks.generation [--models gpt2,llama_static] [--tokens 32] [--rounds 3]

Models whose names end in ``_static`` use a `StaticCache`, others a `DynamicCache`. Weights are
random. Each contender generates the same tokens in its own process. Times are CPU seconds, as in
``benchmarks.requests``; for tokens per second, divide the printed number of tokens by them.
"""

from __future__ import annotations

from typing import Any

from benchmarks import passes
from benchmarks.passes import Pass

MODELS = ("gpt2", "llama", "gpt2_static", "llama_static")
_STATIC = "_static"
CONTENDERS = ("eager", "inductor", "tvmify")
PROMPTS = (17, 33, 45)
SEED = 1


def _model(name: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(SEED)
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens)).eval()
    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
    heads = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, **tokens)
    ).eval()


def _pass(name: str, model: str, count: int) -> Pass:
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    network, programs = _model(model.removesuffix(_STATIC)), None
    cache = "static" if model.endswith(_STATIC) else None
    # Turn off transformers' own compilation, which is for GPUs.
    options: dict[str, Any] = {
        "cache_implementation": cache,
        "disable_compile": True,
        "do_sample": False,
    }
    if name == "inductor":
        network.forward = torch.compile(network.forward, dynamic=True)
    elif name == "tvmify":
        from tvmify import tvmify

        network = tvmify(network, compare=False, progress=False)
        programs = network.cache_info
    draw = torch.Generator().manual_seed(SEED)
    prompts = [torch.randint(3, 1000, (1, length), generator=draw) for length in PROMPTS]

    def run() -> None:
        for prompt in prompts:
            mask = torch.ones_like(prompt)
            network.generate(prompt, attention_mask=mask, max_new_tokens=count, **options)

    return Pass(run, lambda: None if programs is None else programs().builds)


def _describe(count: int) -> str:
    return f"{count * len(PROMPTS)} tokens after prompts of {PROMPTS}"


def main() -> None:
    """Run as the driver, or as one of the contenders."""
    module, counted = "benchmarks.generation", ("tokens", 32)
    passes.main(module, MODELS, CONTENDERS, _pass, counted, _describe)


if __name__ == "__main__":
    main()
