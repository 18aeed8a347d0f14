"""No kernel leaves the compiler unscheduled, and no rule gives up on what it takes.

Models and operators of the benchmarks are lowered and scheduled, but not built: LLVM would take
minutes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import models, operators
from tests.compiler.programs import target
from tvmify.compiler.environment import prepare_tvm

#: Their kernels are of the same kinds as those of a smaller model.
TWINS = {"resnet50", "vgg16", "vit_base", "bert_base", "minilm_128", "gpt2_prefill"}
#: Their constants have values, so they cannot be built without memory.
REAL = {"minilm_16", "gpt2_decode", "whisper_tiny", "lstm"}
#: What PyTorch computes, inside of the program.
BRIDGED = {"adaptive_max_pool2d", "embedding_bag", "embedding_bag_offsets"}


def given_up(module: nn.Module, args: tuple[Any, ...]) -> dict[str, str]:
    """Return operators that TVM does not compute, or kernels without a rule that did its work."""
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.decompositions import decompose
    from tvmify.compiler.importer import import_program
    from tvmify.compiler.schedule import schedule

    tvm_target = pipeline.tvm_target(target())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch and TVM
        exported = torch.export.export(module, args, strict=False)
        with tvm_target:
            imported = import_program(decompose(exported))
        if imported.bridged:
            return dict.fromkeys(imported.bridged, "computed by PyTorch")
        fused = pipeline.fuse(pipeline.lower(imported.ir_mod, tvm_target), tvm_target)
        rules = schedule(fused, tvm_target)[1]
    return {name: rule for name, rule in rules.items() if "unscheduled" in rule or "failed" in rule}


@pytest.mark.parametrize("name", [name for name in models.MODELS if name not in TWINS])
def test_models(name: str):
    with torch.device("cpu" if name in REAL else "meta"):
        module, args = models.build(name)
    assert not given_up(module, args)


class Several(nn.Module):
    """Modules side by side, each with arguments of its own."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, args: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        """Return the result of each."""
        return [part(*own) for part, own in zip(self.parts, args, strict=True)]


def test_operators():
    cases = [operators.build(name) for name in operators.OPERATORS if name not in BRIDGED]
    assert not given_up(Several([module for module, _ in cases]), ([args for _, args in cases],))


@pytest.mark.parametrize("name", sorted(BRIDGED))
def test_operators_that_pytorch_computes(name: str):
    assert set(given_up(*operators.build(name)).values()) == {"computed by PyTorch"}
