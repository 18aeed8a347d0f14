"""The models of the benchmark: plain PyTorch, or configurations of transformers; no downloads.

Weights are random and equal in every process, except MiniLM's, which are real. A builder returns a
module in evaluation mode and the arguments of its call. The batch size is 1 unless the name says
otherwise.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

#: The builder of each model, as text: the driver must not import torch, since the peak memory of a
#: worker starts from the driver's.
MODELS: dict[str, str] = {
    "resnet18": "vision:resnet18",
    "resnet50": "vision:resnet50",
    "vgg16": "vision:vgg16",
    "mobilenet_v2": "mobile:mobilenet_v2",
    "efficientnet": "mobile:efficientnet",
    "convnext_tiny": "mobile:convnext_tiny",
    "unet": "vision:unet",
    "vit_base": "transformer:vit_base",
    "bert_base": "transformer:bert_base",
    "minilm_16": "transformer:minilm_16",
    "minilm_128": "transformer:minilm_128",
    "gpt2_prefill": "transformer:gpt2_prefill",
    "gpt2_decode": "transformer:gpt2_decode",
    "whisper_tiny": "transformer:whisper_tiny",
    "lstm": "small:lstm",
    "mlp_1": "small:mlp_1",
    "mlp_64": "small:mlp_64",
    "dlrm": "small:dlrm",
}

#: Types of weights and inputs, the usual one first.
DTYPES = ("float32", "bfloat16")


def chosen(names: str, known: Sequence[str]) -> list[str]:
    """Return the names that a list such as ``"resnet18,mlp*"`` matches, in the order of ``known``.

    Raises
    ------
    ValueError
        A name or a pattern matches nothing; the message lists the known names.
    """
    patterns = names.replace(",", " ").split()
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"{pattern!r} is none of: {', '.join(known)}")
    return [name for name in known if any(fnmatch.fnmatch(name, p) for p in patterns)]


def in_dtype(name: str, dtype: str) -> str:
    """Return the name that `build` gives to a model with another floating-point dtype."""
    return name if dtype == DTYPES[0] else f"{name}.{dtype}"


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and the arguments of its call, the same in every process."""
    import torch

    name, _, dtype = name.partition(".")
    file, builder = MODELS[name].split(":")
    torch.manual_seed(0)
    module, args = getattr(importlib.import_module(f"{__name__}.{file}"), builder)()
    if dtype:
        kind = getattr(torch, dtype)
        module = module.to(kind)
        args = tuple(arg.to(kind) if arg.is_floating_point() else arg for arg in args)
    return module.eval(), args
