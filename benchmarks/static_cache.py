"""Decoding steps of a small Llama with static caches of several sizes; contenders take turns.

    OMP_NUM_THREADS=1 python -m benchmarks.static_cache [--rooms 512,4096]
        [--contenders eager,inductor,tvmify]

The model has 2 layers of width 256, with 4 query heads and 2 key heads; its weights are random. A
step reads the whole cache, however much of it is filled.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

STEPS = 200
PROMPT = 9


def _model() -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 48}
    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def _contender(name: str, model: Any) -> Any:
    import torch

    from tvmify import tvmify

    if name == "eager":
        return model
    own = copy.deepcopy(model)
    if name == "tvmify":
        return tvmify(own, compare=False, progress=False, strict=True)
    own.forward = torch.compile(own.forward, backend=name, dynamic=True)
    return own


def _steps(network: Any, room: int) -> Callable[[int], float]:
    """Return a function that runs the step at a position, and returns its seconds."""
    import torch
    import transformers

    cache = transformers.StaticCache(config=network.config, max_cache_len=room)
    tokens = torch.arange(3, 3 + PROMPT)[None]
    network(tokens, past_key_values=cache)

    def step(place: int) -> float:
        start = time.perf_counter()
        network(tokens[:, :1], past_key_values=cache, position_ids=torch.tensor([[place]]))
        return time.perf_counter() - start

    return step


def main() -> None:
    """Print a line for each contender and size."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.static_cache")
    parser.add_argument("--rooms", default="512,4096", help="cache sizes in tokens")
    parser.add_argument("--contenders", default="eager,inductor,tvmify")
    given = parser.parse_args()
    names, model = given.contenders.split(","), _model()
    networks = {name: _contender(name, model) for name in names}
    with torch.inference_mode():
        for room in map(int, given.rooms.split(",")):
            steps = {name: _steps(network, room) for name, network in networks.items()}
            times: dict[str, list[float]] = {name: [] for name in names}
            for place in range(PROMPT, PROMPT + STEPS):
                for name, step in steps.items():
                    times[name].append(step(place))
            for name, seconds in times.items():
                print(f"{room:6} {name:10} {statistics.median(seconds) * 1e3:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
