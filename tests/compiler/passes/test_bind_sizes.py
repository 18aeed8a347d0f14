"""Sizes of kernels as single numbers: what the rules need to know their loops again."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import Array, random


@pytest.mark.parametrize(("first", "step"), [(1, 2), (5, 4)])
def test_rows_that_are_a_quotient_are_the_rows_of_a_product(first: int, step: int) -> None:
    weight = random(16, 48, seed=0)

    def some_rows(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        rows = relax.op.strided_slice(x, [0], [first], [x.ty.shape[0]], [step])
        product = builder.emit(relax.op.matmul(builder.emit(rows), w))
        return relax.op.add(product, relax.const(1.0))

    def reference(x: Array, w: Array) -> Array:
        return np.asarray(x[first::step] @ w + 1)

    program = symbolic.build(some_rows, [(("s", 16), "float32")], [weight])
    assert "matmul" in program.rules
    for count in (6, 9, 10, 33, 97):
        symbolic.check(program, reference, [random(count, 16, seed=1)], [weight], tolerance=1e-5)
