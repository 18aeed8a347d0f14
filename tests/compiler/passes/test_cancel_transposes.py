"""Reshapes move below the next operator only if it has their shape."""

from __future__ import annotations

import numpy as np
from tvm import relax

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import Array, random


def test_a_vector_makes_rows_of_one_element_longer() -> None:
    """As for the frequencies of rotary positions, if each item has one position."""

    def described(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        rows = builder.emit(relax.op.reshape(x, [x.ty.shape[0], 1, 1]))
        return relax.op.sin(builder.emit(relax.op.multiply(rows, w)))

    def reference(x: Array, w: Array) -> Array:
        return np.sin(x[:, None] * w)

    program = symbolic.build(described, [(("s", 1), "float32"), ((4,), "float32")])
    for size in (3, 9):
        symbolic.check(program, reference, [random(size, 1, seed=1), random(4, seed=2)])
