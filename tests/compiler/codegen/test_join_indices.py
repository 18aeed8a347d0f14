"""Vectors of rows that consist of several axes read consecutive elements."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from tests.compiler.kernels.kernels import NATIVE, build, lowered, random
from tvmify.compiler.codegen.join_indices import JoinIndices


@pytest.mark.parametrize("shape", [(1, 4, 56, 56), (2, 8, 28), (16, 14, 14)], ids=str)
def test_rows_of_several_axes(shape: tuple[int, ...]):
    x = random(*shape)
    built = build(lambda _, x: relax.op.nn.relu(x), [x])
    np.testing.assert_array_equal(built.run([x]), np.maximum(x, 0))
    kernel = built.kernel().with_attr("global_symbol", "kernel")
    code = lowered(tvm.IRModule({"kernel": kernel}), NATIVE).script()
    assert "truncmod" not in code
    assert "T.Div" not in code


def test_other_indices_are_as_they_were():
    x, scale = random(1, 4, 56, 56), random(1, 1, 56, 1, seed=1)
    built = build(lambda _, x, scale: relax.op.multiply(x, scale), [x, scale])
    np.testing.assert_array_equal(built.run([x, scale]), x * scale)


@T.prim_func(private=True, s_tir=True)
def of_two_types(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):  # type: ignore[valid-type]
    for outer in T.serial(T.int32(4)):
        for lane in T.vectorized(T.int64(16)):
            y[T.Cast("int64", outer) * 16 + lane] = x[
                (T.Cast("int64", outer) * 16 + lane) // 8 * 8 + lane % 8
            ]


def test_indices_of_two_types_are_as_they_were():
    module = tvm.IRModule({"main": of_two_types})
    tvm.ir.assert_structural_equal(JoinIndices()(module), module)
