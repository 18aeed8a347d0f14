"""No kernel leaves the compiler unscheduled: for every model and operator of the benchmarks.

They are lowered and scheduled, but not built: LLVM would take minutes.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from benchmarks import models, operators
from tests.compiler.programs import target
from tvmify.compiler.environment import prepare_tvm


def unscheduled(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> dict[str, str]:
    """Return the kernels of a module that no rule schedules, or none without another failing."""
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.importer import import_program
    from tvmify.compiler.schedule import schedule

    tvm_target = pipeline.tvm_target(target())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch and TVM
        exported = torch.export.export(module, args, strict=False)
        with tvm_target:
            imported = import_program(exported)
        fused = pipeline.fuse(pipeline.lower(imported.ir_mod, tvm_target), tvm_target)
        rules = schedule(fused, tvm_target)[1]
    return {name: rule for name, rule in rules.items() if "unscheduled" in rule or "failed" in rule}


@pytest.mark.parametrize("name", models.MODELS)
def test_models(name: str):
    # Without memory for weights; MiniLM reads its own.
    with torch.device("cpu" if name.startswith("minilm") else "meta"):
        module, args = models.build(name)
    assert not unscheduled(module, args)


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_operators(name: str):
    assert not unscheduled(*operators.build(name))
