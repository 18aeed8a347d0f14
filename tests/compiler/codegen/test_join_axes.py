"""Loops over several axes of symbolic sizes index flat memory by one joined index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm.script import tirx as T

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.codegen.join_axes import JoinAxes

AUTO = Dim.AUTO


@T.prim_func(private=True, s_tir=True)
def three_axes(a: T.handle, b: T.handle, batch: T.int64, n: T.int64, m: T.int64):
    x = T.match_buffer(a, (batch, n, m), "float32")
    y = T.match_buffer(b, (batch, n, m), "float32")
    for p in range(batch * n * m):
        y[p // (n * m), p % (n * m) // m, p % m] = x[p // (n * m), p % (n * m) // m, p % m]


@T.prim_func(private=True, s_tir=True)
def three_axes_joined(a: T.handle, b: T.handle, batch: T.int64, n: T.int64, m: T.int64):
    x = T.match_buffer(a, (batch, n, m), "float32")
    y = T.match_buffer(b, (batch, n, m), "float32")
    for p in range(batch * n * m):
        y[T.int64(0), T.int64(0), p] = x[T.int64(0), T.int64(0), p]


@T.prim_func(private=True, s_tir=True)
def last_two(a: T.handle, b: T.handle, n: T.int64):
    x = T.match_buffer(a, (4, n, 3), "float32")
    y = T.match_buffer(b, (4, n, 3), "float32")
    for i, p in T.grid(4, n * 3):
        y[i, p // 3, p % 3] = x[i, p // 3, p % 3]


@T.prim_func(private=True, s_tir=True)
def last_two_joined(a: T.handle, b: T.handle, n: T.int64):
    x = T.match_buffer(a, (4, n, 3), "float32")
    y = T.match_buffer(b, (4, n, 3), "float32")
    for i, p in T.grid(4, n * 3):
        y[i, T.int64(0), p] = x[i, T.int64(0), p]


@T.prim_func(private=True, s_tir=True)
def transposed(a: T.handle, b: T.handle, n: T.int64, m: T.int64):
    x = T.match_buffer(a, (m, n), "float32")
    y = T.match_buffer(b, (2, n, m), "float32")
    for i, p in T.grid(2, n * m):
        y[i, p // m, p % m] = x[p % m, p // m]


@T.prim_func(private=True, s_tir=True)
def transposed_joined(a: T.handle, b: T.handle, n: T.int64, m: T.int64):
    x = T.match_buffer(a, (m, n), "float32")
    y = T.match_buffer(b, (2, n, m), "float32")
    for i, p in T.grid(2, n * m):
        y[i, T.int64(0), p] = x[p % m, p // m]


@pytest.mark.parametrize(
    ("function", "joined"),
    [
        (three_axes, three_axes_joined),
        (last_two, last_two_joined),
        (transposed, transposed_joined),
        (three_axes_joined, three_axes_joined),
    ],
    ids=["three axes", "last two", "transposed", "joined"],
)
def test_indices(function: tvm.tirx.PrimFunc, joined: tvm.tirx.PrimFunc) -> None:
    module = JoinAxes()(tvm.IRModule({"main": function}))
    tvm.ir.assert_structural_equal(module["main"], joined)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("axes", "function"),
    [
        ((0, 1, 2, 3), lambda x: x.exp()),
        ((0, 2, 3), lambda x: x.exp() + 1),
        ((0, 2), lambda x: x.sigmoid()[:, 1:] * x[:, :-1]),
        ((1, 3), lambda x: x.transpose(1, 3) * 2),
    ],
    ids=["all", "channels", "slices", "transposed"],
)
def test_results(axes: tuple[int, ...], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    module = Function(function).eval()
    sizes = (dict.fromkeys(axes, AUTO),)
    fast = tvmify(module, dynamic_shapes=sizes, cache=False, strict=True)
    shape = (3, 5, 7, 18)
    for more in (0, 1, 3):
        x = torch.randn([size + more * (axis in axes) for axis, size in enumerate(shape)])
        assert_close_to_reference(fast(x), module, (x,), {})
    assert fast.cache_info().builds == 1
