"""Tiles are transposed by shuffles of whole vectors, with the same results."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import TARGETS, build, lowered, random

op = relax.op
_SHAPES = {
    "whole tiles": (2, 32, 48),
    "tails": (3, 37, 21),
    "tails of several vectors": (1, 28, 31),
    "too narrow for tiles": (2, 3, 40),
}
_DTYPES = ["float32", "float64", "float16", "int64", "int32", "int8"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
def test_transposes(shape: tuple[int, ...], target: tvm.target.Target):
    for dtype in _DTYPES:
        x = (random(*shape) * 100).astype(dtype)
        built = build(lambda _, x: op.permute_dims(x, [0, 2, 1]), [x], target=target)
        np.testing.assert_array_equal(built.run([x]), x.transpose(0, 2, 1), dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_no_element_is_loaded_by_itself(target: tvm.target.Target):
    x, y = random(48, 32), random(32, 48, seed=1)

    def program(_: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
        return op.nn.relu(op.add(op.permute_dims(x), y))

    built = build(program, [x, y], target=target)
    np.testing.assert_array_equal(built.run([x, y]), np.maximum(x.T + y, 0))
    kernel = built.kernel().with_attr("global_symbol", "kernel")
    code = lowered(tvm.IRModule({"kernel": kernel}), target).script()
    assert "T.Shuffle" in code
    assert {stride for _, stride in re.findall(r"T\.Ramp\((.*?), (\d+), \d+\)", code)} == {"1"}


@pytest.mark.parametrize("target", TARGETS)
def test_each_tile_of_a_merged_kernel_is_transposed_after_its_copy(target: tvm.target.Target):
    x, y = random(8, 8), random(8, seed=1)

    def program(_: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
        total = op.sum(op.multiply(op.permute_dims(x), y))
        return op.permute_dims(op.add(x, op.exp(total)))

    built = build(program, [x, y], target=target)
    np.testing.assert_allclose(built.run([x, y]), (x + np.exp((x.T * y).sum())).T, rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [("n", "rows", "columns"), ("n", 12, "columns"), (3, "n", 9)])
def test_tiles_of_any_size(shape: tuple[int | str, ...], target: tvm.target.Target):
    """All are whole: the last one overlaps the one before it."""
    program = symbolic.build(
        lambda _, x: op.add(op.permute_dims(x, [0, 2, 1]), op.permute_dims(x, [0, 2, 1])),
        [(shape, "float32")],
        target=target,
    )
    for sizes in ((2, 7), (3, 8), (8, 9), (9, 16), (15, 17), (16, 31), (33, 32), (97, 101)):
        own = dict(zip(("rows", "columns"), sizes, strict=True)) | {"n": sizes[0]}
        x = random(*(own.get(size, size) for size in shape))
        symbolic.check(program, lambda x: 2 * x.transpose(0, 2, 1), [x])


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_of_any_size_load_vectors(target: tvm.target.Target):
    program = symbolic.build(
        lambda _, x: op.permute_dims(x), [(("rows", "columns"), "float32")], target=target
    )
    kernels = {v: f for v, f in program.ir_mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    code = lowered(tvm.IRModule(kernels), target).script()
    whole = code[code.index("T.Shuffle") : code.index("else:")]
    assert "T.Ramp" in whole
    strides = re.findall(r"T\.Ramp\((?:.*?), (?:T\.int64\()?(\d+)", whole)
    assert set(strides) == {"1"}
