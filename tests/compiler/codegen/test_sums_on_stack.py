"""Tiles of sums live in registers, not in memory that the runtime hands out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import tvm
from tvm import relax

from tests.compiler.kernels.kernels import AVX512, build, random
from tvmify.compiler.codegen.lowering import lower


def test_large_tiles_are_not_asked_of_the_runtime():
    def describe(builder, left, right):
        return relax.op.matmul(left, right)

    built = build(describe, [random(64, 32)], [random(32, 256, seed=1)], AVX512)
    kernel = built.kernel()
    assert "matmul_tile" in str(kernel)
    with ThreadPoolExecutor(1) as pool:
        lowered, _ = lower(
            tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), AVX512, pool
        )
    assert "alloc_local" in str(lowered)
    assert "AllocWorkspace" not in str(lowered)
