"""Tiles of sums are in registers, not in memory that the runtime allocates."""

from __future__ import annotations

import tvm
from tvm import relax

from tests.compiler.kernels.kernels import AVX512, build, random
from tvmify.compiler.codegen.lowering import lower
from tvmify.system.workers import Workers


def test_large_tiles_are_not_allocated_by_the_runtime():
    def describe(builder, left, right):
        return relax.op.matmul(left, right)

    built = build(describe, [random(64, 32)], [random(32, 256, seed=1)], AVX512)
    kernel = built.kernel()
    assert "matmul_tile" in str(kernel)
    named = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    lowered, _ = lower(named, AVX512, Workers(1))
    assert "alloc_local" in str(lowered)
    assert "AllocWorkspace" not in str(lowered)
