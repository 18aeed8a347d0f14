"""Intermediate tensors are shrunk to what loops use; those of symbolic sizes stay whole."""

from __future__ import annotations

import torch
import tvm
import tvm_ffi
from torch import nn
from torch.export import Dim
from tvm import s_tir
from tvm.script import tirx as T

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.codegen.compact_allocations import CompactAllocations
from tvmify.compiler.sizes import number_or_expression


@T.prim_func(private=True, s_tir=True)
def two_stages(a: T.handle, b: T.handle, n: T.int64, m: T.int64):
    x = T.match_buffer(a, (n, m, 8), "float32")
    y = T.match_buffer(b, (n, m, 8), "float32")
    with T.sblock("root"):
        total = T.sblock_alloc_buffer((n, m))
        few = T.sblock_alloc_buffer((64,))
        for p in range(n * m):
            with T.sblock():
                total[p // m, p % m] = x[p // m, p % m, 0]
        for i in range(4):
            with T.sblock():
                few[i] = x[0, 0, i]
        for p in range(n * m):
            with T.sblock():
                own = T.sblock_alloc_buffer((n, m, 8))
                for i in range(8):
                    with T.sblock():
                        own[p // m, p % m, i] = x[p // m, p % m, i] + total[p // m, p % m]
                for i in range(8):
                    with T.sblock():
                        y[p // m, p % m, i] = own[p // m, p % m, i] * few[i % 4]


def test_shapes() -> None:
    module = tvm.transform.Sequential(
        [s_tir.transform.ConvertBlocksToOpaque(), CompactAllocations()]
    )(tvm.IRModule({"main": two_stages}))
    shapes: set[tuple[str, ...]] = set()

    def note(block: s_tir.SBlock) -> None:
        for buffer in block.alloc_buffers:
            shapes.add(tuple(str(number_or_expression(size)) for size in buffer.shape))

    tvm_ffi.structural_walk(module["main"].body, [(s_tir.SBlock, note)], order="pre")
    assert shapes == {("n", "m"), ("4",), ("1", "1", "8")}


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(1) - x.var(1, keepdim=True)


def test_reductions_across_images_of_any_size() -> None:
    torch.manual_seed(0)
    module = Softmax().eval()
    sizes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    fast = tvmify(module, dynamic_shapes=sizes, cache=False, strict=True)
    for n, height, width in ((2, 24, 28), (3, 26, 30), (2, 32, 25)):
        x = torch.randn(n, 6, height, width)
        assert_close_to_reference(fast(x), module, (x,), {})
    assert fast.cache_info().builds == 1
