"""Rules for GPUs decline functions that they would split into several kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from tvm.ir import GlobalVar
from tvm.s_tir.dlight import gpu as dlight
from tvm.script import tirx as T

from tests.compiler.gpu_programs import exported, gpu
from tvmify.compiler import compile, pipeline
from tvmify.compiler.cuda import nvcc
from tvmify.compiler.cuda.rules import RULES
from tvmify.compiler.kernels.common.rule import apply_in_turn


@T.prim_func(s_tir=True)
def sums_of_sums(a: T.handle, b: T.handle):
    """Sums rows, and then, for each row, all of these sums."""
    x = T.match_buffer(a, (64, 64), "float32")
    y = T.match_buffer(b, (64,), "float32")
    total = T.sblock_alloc_buffer((64,), "float32")
    for i, j in T.grid(64, 64):
        with T.sblock("rows"):
            row, column = T.axis.remap("SR", [i, j])
            with T.init():
                total[row] = T.float32(0)
            total[row] = total[row] + x[row, column]
    for i, j in T.grid(64, 64):
        with T.sblock("all"):
            row, other = T.axis.remap("SR", [i, j])
            with T.init():
                y[row] = T.float32(0)
            y[row] = y[row] + total[other]


def test_a_function_of_several_kernels_is_left_and_no_rule_fails():
    target = pipeline.tvm_target(gpu())
    with target:
        cut = dlight.Fallback().apply(sums_of_sums, target, False)
    (shared,) = cut.mod["main"].body.block.alloc_buffers
    assert str(shared.scope()) == "global"
    function = GlobalVar("sums")
    outcomes = apply_in_turn({"fallback": RULES["fallback"]}, {function: sums_of_sums}, target)[1]
    (outcome,) = outcomes.values()
    assert (outcome.rule, outcome.failures) == (None, [])


_NUMBERS = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (lambda x: x[:, :0].clone(), (_NUMBERS,)),
        (lambda x: x.repeat(0, 2), (_NUMBERS,)),
        (torch.block_diag, (_NUMBERS, _NUMBERS)),
        (lambda x: torch.cat([x[:0], x, x[:0]]), (_NUMBERS,)),
        (lambda x: x.argmax(), (torch.tensor(3.0),)),
        (lambda x: x.max(-1), (_NUMBERS[:, :1],)),
        (lambda x: x.relu().mean(1) + x.sum(1), (_NUMBERS[:, :1],)),
        (lambda x: F.adaptive_max_pool1d(x, 2), (_NUMBERS[None],)),
        (torch.linalg.matrix_rank, (_NUMBERS,)),
    ],
)
def test_every_function_is_scheduled(program, args, monkeypatch):
    # Tensors without elements, and reductions of single ones, are at the edge of TVM's own rules.
    monkeypatch.setattr(nvcc, "compile", lambda *_: b"")
    artifact = compile(exported(program, *args), gpu())
    assert artifact.report["unscheduled"] == 0
    assert not any("failed" in rule for rule in artifact.report["kernels"].values())


def test_nothing_is_launched_for_no_elements(monkeypatch):
    def kernels(program) -> int:
        sources = []
        monkeypatch.setattr(nvcc, "compile", lambda source, _: sources.append(source) or b"")
        compile(exported(program, _NUMBERS), gpu())
        return sum(source.count("_kernel(") for source in sources)

    assert kernels(lambda x: (x[:, :0].clone(), x + 1)) == kernels(lambda x: x + 1) > 0
