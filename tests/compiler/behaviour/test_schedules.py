"""Every kernel is scheduled, and no rule fails on a function that it accepts.

Models and operators of the benchmarks are lowered and scheduled, but not built: LLVM would take
minutes. Some of them are also scheduled for other processors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers.initialization import no_init_weights
from tvm.target import Target

from benchmarks import models, operators
from tests.compiler.kernels.kernels import AVX2, AVX512, NATIVE, NEON
from tests.compiler.programs import recorded, target
from tvmify.compiler.environment import prepare_tvm

#: Their constants have values, so they cannot be built from tensors without memory.
REAL = {
    "vit_base",
    "bert_base",
    "minilm_16",
    "minilm_128",
    "gpt2_prefill",
    "gpt2_decode",
    "whisper_tiny",
    "lstm",
}
#: Together they have most kinds of kernels, and each is lowered in at most three seconds.
EVERYWHERE = {"unet", "minilm_16", "whisper_tiny", "lstm", "mlp_64", "dlrm"}
OTHERS = [machine for machine in (AVX512, AVX2, NEON) if machine is not NATIVE]
#: The bridged operators.
BRIDGED = {
    "embedding_bag",
    "embedding_bag_offsets",
    "inverse_fourier",
}


def given_up(
    module: nn.Module, args: tuple[Any, ...], others: Sequence[Target] = ()
) -> dict[str, str]:
    """Return operators that TVM does not compute, and kernels without a working rule.

    The targets are this machine and `others`.
    """
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.frontend.decompositions import decompose
    from tvmify.compiler.frontend.importer import import_program

    left = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch and TVM
        program = decompose(recorded(module, args))
        for machine in (pipeline.tvm_target(target()), *others):
            with machine:
                imported = import_program(program)
            if imported.bridged:
                return dict.fromkeys(imported.bridged, "computed by PyTorch")
            fused = pipeline.fuse(pipeline.lower(imported.ir_mod, machine), machine)
            outcomes = pipeline.schedule(fused, machine).outcomes
            assert outcomes
            left |= {
                f"{name} with {machine}": str(outcome)
                for name, outcome in outcomes.items()
                if outcome.rule is None or outcome.failures
            }
    return left


def shorten(module: nn.Module) -> None:
    """Keep two of several equal layers in a row, since they have the same kernels."""
    for layers in list(module.modules()):
        if isinstance(layers, (nn.ModuleList, nn.Sequential)) and all(map(_is_compound, layers)):
            kinds = [_kind(layer) for layer in layers]
            for at in reversed(range(2, len(kinds))):
                if kinds[at] == kinds[at - 1] == kinds[at - 2]:
                    del layers[at]


def _is_compound(layer: nn.Module) -> bool:
    return any(True for _ in layer.children())


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    return type(layer), [(name, value.shape) for name, value in layer.state_dict().items()]


@pytest.mark.parametrize("name", models.MODELS)
def test_models(name: str):
    with torch.device("cpu" if name in REAL else "meta"), no_init_weights():
        module, args = models.build(name)
    shorten(module)
    assert not given_up(module, args, OTHERS if name in EVERYWHERE else ())


class Several(nn.Module):
    """Several independent modules, each with its own arguments."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, args: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        """Return the result of each."""
        return [part(*own) for part, own in zip(self.parts, args, strict=True)]


@pytest.mark.thorough
def test_operators():
    cases = [operators.build(name) for name in operators.OPERATORS if name not in BRIDGED]
    assert not given_up(Several([module for module, _ in cases]), ([args for _, args in cases],))


class Norm(nn.Module):
    """A norm over some of the last axes, or the softmax of the last."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.name, self.count = name, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result, in the same shape."""
        if "softmax" in self.name:
            return getattr(torch, self.name)(x, -1)
        return getattr(nn.functional, self.name)(x, x.shape[-self.count :])


ROWS = [(1,), (16,), (17,), (33,), (34,), (100,), (403,), (1, 17), (17, 1), (8, 5), (2, 13, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_norms_of_one_row_or_several(name: str, dtype: torch.dtype):
    """For any length: the last vector may not be full, or may be the only one."""
    rows = ROWS if dtype == torch.float32 else ROWS[::2]
    cases = [
        (Norm(name, count), (torch.randn(shape, dtype=dtype),))
        for shape in rows
        for count in range(1, 1 + (1 if "softmax" in name else len(shape)))
    ]
    parts = Several([module for module, _ in cases])
    assert not given_up(parts, ([args for _, args in cases],), OTHERS)


@pytest.mark.parametrize("name", sorted(BRIDGED))
def test_operators_computed_by_pytorch(name: str):
    assert set(given_up(*operators.build(name)).values()) == {"computed by PyTorch"}
