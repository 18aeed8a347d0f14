"""The process of one contender on an NVIDIA GPU; it answers as `benchmarks.worker` does.

    python -m benchmarks.gpu_worker CASE CONTENDER FOLDER

The reference contender only writes the expected outputs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.contenders import first_line
from benchmarks.gpu_timing import burst
from benchmarks.models import build
from benchmarks.reference import OUTPUTS
from benchmarks.worker import largest_error

DEVICE = "cuda"
#: The contender that only writes the expected outputs.
REFERENCE = "reference"


@dataclass(frozen=True)
class Case:
    """A model as it runs on a GPU.

    Attributes
    ----------
    model
        Its name in `benchmarks.models.MODELS`.
    batch
        The number of the model's examples in a batch.
    tokens
        The length of the sequences, if it is not the model's default.
    """

    model: str
    batch: int = 1
    tokens: int | None = None


#: All in float16, images and their convolutions with channels last. They run in this order, the
#: most informative ones first.
CASES = {
    "gpt2_decode_1": Case("gpt2_decode"),
    "mlp_1": Case("mlp_1"),
    "bert_base_1x128": Case("bert_base"),
    "bert_base_8x512": Case("bert_base", batch=8, tokens=512),
    "vit_base_1": Case("vit_base"),
    "resnet50_1": Case("resnet50"),
    "resnet50_32": Case("resnet50", batch=32),
}


def loaded(case: Case, device: str = DEVICE) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model in float16 and its arguments, on the GPU or another device."""
    module, args = build(case.model)
    module = module.half().to(device)
    args = tuple(_batched(arg, case).to(device) for arg in args)
    if any(isinstance(child, torch.nn.Conv2d) for child in module.modules()):
        layout = torch.channels_last
        module = module.to(memory_format=layout)  # type: ignore[call-overload]
        args = tuple(arg.contiguous(memory_format=layout) for arg in args)
    return module, args


def _batched(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    if case.tokens is not None:
        tensor = tensor.repeat(1, -(-case.tokens // tensor.shape[1]))[:, : case.tokens]
    tensor = tensor.repeat(case.batch, *[1] * (tensor.dim() - 1))
    if tensor.is_floating_point():
        tensor = tensor.half()
    return tensor


# ----------------------------------------------------------------------------------- contenders


def eager(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """PyTorch without a compiler."""
    return lambda: module(*args)


def reduce_overhead(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """``torch.compile`` with CUDA graphs, and libraries for products and convolutions."""
    compiled = torch.compile(module, mode="reduce-overhead")
    return lambda: compiled(*args)


def max_autotune(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """``torch.compile`` with its strongest settings: templates are timed, CUDA graphs replayed."""
    compiled = torch.compile(module, mode="max-autotune")
    return lambda: compiled(*args)


def tvmify(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """Decorate the module, with CUDA graphs and tuning."""
    from tvmify import tvmify as decorate

    fast = decorate(
        module, target="cuda", cuda_graph=True, tune="quick", strict=True, progress=False
    )
    return lambda: fast(*args)


#: The slowest to prepare comes last, so that it is left out if time runs short.
CONTENDERS = {
    "eager": eager,
    "tvmify": tvmify,
    "reduce-overhead": reduce_overhead,
    "max-autotune": max_autotune,
}


# ------------------------------------------------------------------------------------ measuring


def make_reference(case: Case, path: Path) -> None:
    """Write the outputs of a model in float64, for weights and inputs rounded to float16."""
    module, args = loaded(case)
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    outputs = pytree.tree_leaves(module.double()(*wide))
    torch.save([output.cpu() for output in outputs], path)


def main() -> None:
    """Reserve standard output for the answers: compilers print to it."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, contender, folder = sys.argv[1:]

    def answer(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=answers, flush=True)

    with torch.inference_mode():
        try:
            if contender == REFERENCE:
                make_reference(CASES[name], Path(folder, OUTPUTS))
                answer({})
                return
            module, args = loaded(CASES[name])
            start = time.perf_counter()
            call = CONTENDERS[contender](module, args)
            outputs = pytree.tree_map(lambda tensor: tensor.cpu(), call())
            first = time.perf_counter() - start
            error = largest_error(outputs, torch.load(Path(folder, OUTPUTS)))
            for _ in range(3):  # graphs are captured after some calls
                call()
        except Exception as failure:  # a failure is a blank with its reason
            answer({"reason": f"{type(failure).__name__}: {first_line(failure)}"})
            return
        answer({"first_call_s": first, "error": error})
        for _ in sys.stdin:
            answer(burst(call) | {"peak_mib": torch.cuda.max_memory_allocated() / 2**20})


if __name__ == "__main__":
    main()
