"""Sizes of kernels as single numbers, which rules need to recognize their loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm import relax, te, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import Array, random
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.passes.bind_sizes import MergeSymbols, symbols_in


def _second(builder: relax.BlockBuilder, x: Any) -> Any:
    return relax.op.strided_slice(x, [0], [1], [x.ty.shape[0]], [2])


def _fourth(builder: relax.BlockBuilder, x: Any) -> Any:
    return relax.op.strided_slice(x, [0], [5], [x.ty.shape[0]], [4])


def _distances(builder: relax.BlockBuilder, x: Any) -> Any:  # of positions from one another
    count = x.ty.shape[0] * 2
    rows = builder.emit(relax.op.reshape(x, [count, 16]))
    return relax.op.strided_slice(rows, [0], [1], [count])


def _halves(builder: relax.BlockBuilder, x: Any) -> Any:
    return builder.emit(relax.op.strided_slice(x, [0], [0], [x.ty.shape[0]], [2]))


def _distances_of_halves(builder: relax.BlockBuilder, x: Any) -> Any:
    return _distances(builder, _halves(builder, x))


def _patches(builder: relax.BlockBuilder, x: Any) -> Any:  # of an image of any size, and a token
    rows = builder.emit(relax.op.reshape(x, [x.ty.shape[0] * x.ty.shape[1], 16]))
    return relax.op.nn.pad(rows, [1, 0, 0, 0])


def _tokens(
    builder: relax.BlockBuilder, x: Any
) -> Any:  # a token before the tokens of each of two items
    return relax.op.nn.pad(x, [0, 0, 1, 0, 0, 0])


#: How rows are made, of which tensor, the result in NumPy, and the columns of the weight.
ROWS: list[tuple[Any, tuple[int | str, ...], Callable[[Array], Array], int]] = [
    (_second, ("s", 16), lambda x: x[1::2], 48),
    (_fourth, ("s", 16), lambda x: x[5::4], 48),
    (_distances, ("s", 2, 16), lambda x: x.reshape(-1, 16)[1:], 48),
    (_distances_of_halves, ("s", 2, 16), lambda x: x[::2].reshape(-1, 16)[1:], 48),
    (_patches, ("s", "t", 16), lambda x: np.pad(x.reshape(-1, 16), ((1, 0), (0, 0))), 48),
    (_tokens, (2, "s", 16), lambda x: np.pad(x, ((0, 0), (1, 0), (0, 0))), 8),
]


@pytest.mark.parametrize(("rows", "shape", "reference", "columns"), ROWS)
def test_computed_rows_are_the_rows_of_a_product(
    rows: Any,
    shape: tuple[int | str, ...],
    reference: Callable[[Array], Array],
    columns: int,
) -> None:
    weight = random(16, columns, seed=0)

    def described(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        chosen = builder.emit(rows(builder, x))
        return relax.op.add(builder.emit(relax.op.matmul(chosen, w)), relax.const(1.0))

    program = symbolic.build(described, [(shape, "float32")], [weight])
    assert "matmul" in program.rules
    for size in (6, 9, 10, 33, 97):
        x = random(*({"s": size, "t": 7}.get(n, n) for n in shape), seed=1)
        symbolic.check(program, lambda x, w: reference(x) @ w + 1, [x], [weight], tolerance=1e-5)


def test_symbols_of_one_name_become_one_variable():
    given, made, other = (tirx.Var(name, "int64") for name in ("n", "n", "m"))
    x = te.placeholder((given, other), name="x")
    y = te.compute((made, other), lambda i, j: x[i, j] + 1, name="y")
    kernel = te.create_prim_func([x, y])
    assert len(_symbols(kernel)) == 3
    assert len(_symbols(MergeSymbols()(tvm.IRModule({"main": kernel}))["main"])) == 2


def _symbols(kernel: tirx.PrimFunc) -> set[tirx.Var]:
    return {v for v in symbols_in(kernel) if v.name in ("n", "m")}


@pytest.mark.parametrize("group", [6, 12, 24, 32])
def test_rows_of_groups_are_the_rows_of_a_product(group: int) -> None:
    def described(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        count = x.ty.shape[0] * group
        product = builder.emit(relax.op.matmul(builder.emit(relax.op.reshape(x, [count, 16])), w))
        return relax.op.add(product, relax.const(1.0))

    program = symbolic.build(described, [(("s", group, 16), "float32"), ((16, 16), "float32")])
    assert "matmul" in program.rules
    for size in (1, 2, 5):
        x, w = random(size, group, 16, seed=0), random(16, 16, seed=1)
        symbolic.check(program, lambda x, w: x.reshape(-1, 16) @ w + 1, [x, w], [], tolerance=1e-5)


@pytest.mark.parametrize(("items", "divisor"), [(2, 16), (3, 16)])
def test_a_part_of_the_rows_of_several_items_is_tiled(items: int, divisor: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.linear(x[:, : x.shape[1] // divisor + 1]))

    net = Net().eval()
    fast = tvmify(net, dynamic_shapes={"x": {1: Dim.AUTO}}, cache=False, strict=True)
    for size in (400, 512, 497):
        x = torch.randn(items, size, 16)
        with torch.no_grad():
            assert_close_to_reference(fast(x), net, (x,))
    assert fast.cache_info().builds == 1
