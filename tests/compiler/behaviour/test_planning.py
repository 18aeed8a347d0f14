"""Memory of a program: buffers that are no longer needed are reused."""

from __future__ import annotations

import torch
from torch import nn
from tvm import relax

from tests.compiler.programs import target
from tvmify.compiler import pipeline
from tvmify.compiler.environment import prepare_tvm
from tvmify.compiler.frontend.decompositions import decompose
from tvmify.compiler.frontend.importer import import_program
from tvmify.torch_compat.silence import silenced


def storages(module: nn.Module, x: torch.Tensor) -> list[int]:
    """Return the sizes of the buffers that a call of a program allocates."""
    prepare_tvm()
    tvm_target = pipeline.tvm_target(target())
    with torch.no_grad(), silenced():
        exported = torch.export.export(module, (x,), strict=False)
        with tvm_target:
            imported = import_program(decompose(exported))
        fused = pipeline.fuse(pipeline.lower(imported.ir_mod, tvm_target), tvm_target)
        planned = pipeline.plan_memory(pipeline.schedule(fused, tvm_target).ir_mod, tvm_target)
    values = [found.value for block in planned["main"].body.blocks for found in block.bindings]
    return [
        int(value.args[0].values[0])
        for value in values
        if isinstance(value, relax.Call)
        and getattr(value.op, "name", "") == "relax.vm.alloc_storage"
    ]


def test_consecutive_layers_alternate_between_two_buffers():
    layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU())]
    x = torch.randn(256, 512)
    own = x.nbytes  # of the result, which outlives the call
    assert sum(storages(nn.Sequential(*layers).eval(), x)) <= 2 * x.nbytes + own
