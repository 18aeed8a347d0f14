"""Products with a vector: a transposed matrix is read in place."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import TARGETS, build, check, random

op = relax.op


def _transposed_first(builder: relax.BlockBuilder, x: relax.Var, v: relax.Var) -> relax.Expr:
    return op.matmul(builder.emit(op.permute_dims(x)), v)


def _transposed_last(builder: relax.BlockBuilder, v: relax.Var, x: relax.Var) -> relax.Expr:
    return op.matmul(v, builder.emit(op.permute_dims(x)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("depth", "count"), [(64, 48), (33, 21), (8, 3)])
def test_a_transposed_matrix_is_not_copied(depth, count, target):
    vector = random(depth, seed=1)
    inputs = [random(depth, count), vector]
    check(_transposed_first, lambda x, v: x.T @ v, inputs, rule="column reduction", target=target)
    inputs = [vector, random(count, depth)]
    check(_transposed_last, lambda v, x: x @ v, inputs, rule="reduction", target=target)


@pytest.mark.parametrize("dtype", ["float16", "int64", "float64"])
def test_other_dtypes(dtype):
    x, v = ((4 * each).astype(dtype) for each in (random(24, 16), random(24, seed=1)))
    built = build(_transposed_first, [x, v])
    wide = [each.astype("longdouble") for each in (x, v)]
    # Of sums in this dtype, in any order (Higham, Accuracy and Stability, section 3.1).
    roundings = 0 if dtype == "int64" else len(v) * np.finfo(dtype).eps / 2
    bound = roundings * (abs(wide[0]).T @ abs(wide[1]))
    assert (abs(built.run([x, v]) - wide[0].T @ wide[1]) <= bound).all()


def test_the_copy_of_a_transposed_weight_can_be_lifted():
    x, v = random(48, 64), random(48)
    built = build(lambda builder, v, x: _transposed_first(builder, x, v), [v], [x])
    assert "fused_transpose" in built.report


@pytest.mark.parametrize("shape", [("k", "n"), (64, "n"), ("k", 20)], ids=str)
def test_symbolic_sizes(shape):
    vector = (shape[0],)
    program = symbolic.build(_transposed_first, [(shape, "float32"), (vector, "float32")])
    assert "elementwise" not in program.rules
    for edge in symbolic.EDGES:
        sizes = {"k": edge, "n": 33}
        inputs = [random(*(sizes.get(size, size) for size in each)) for each in (shape, vector)]
        symbolic.check(program, lambda x, v: x.T @ v, inputs)
