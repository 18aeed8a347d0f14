"""Vectors whose lanes are selected by position in a short row have the right elements."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.compiler.kernels.kernels import TARGETS, build, random

op = relax.op


@pytest.mark.parametrize("target", TARGETS)
def test_padded_rows_that_are_shorter_than_a_vector(target: tvm.target.Target):
    x, scale, y, z = (random(1, n, 7, 8, seed=i) for i, n in enumerate((4, 1, 4, 4)))

    def program(_: relax.BlockBuilder, *given: relax.Var) -> relax.Expr:
        x, scale, y, z = given
        half = op.strided_slice(op.multiply(x, scale), [3], [0], [4])
        padded = op.nn.pad(op.negative(half), [0, 0, 0, 0, 0, 0, 4, 0])
        rows = op.permute_dims(op.add(op.add(padded, y), z), [0, 2, 1, 3])
        return op.reshape(rows, [1, 7, 32])

    built = build(program, [x, scale, y, z], target=target)
    padded = np.concatenate([np.zeros_like(x[..., :4]), -(x * scale)[..., :4]], axis=-1)
    expected = (padded + y + z).transpose(0, 2, 1, 3).reshape(1, 7, 32)
    np.testing.assert_allclose(built.run([x, scale, y, z]), expected, rtol=1e-6)
