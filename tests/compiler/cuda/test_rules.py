"""Rules for GPUs decline functions that they would split into several kernels."""

from __future__ import annotations

from tvm.ir import GlobalVar
from tvm.s_tir.dlight import gpu as dlight
from tvm.script import tirx as T

from tests.compiler.gpu_programs import gpu
from tvmify.compiler import pipeline
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
