"""Products of few rows with an activation that is read in place: tails, batches, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import (
    NEON,
    TARGETS,
    build,
    check,
    has_parallel_loop,
    random,
)
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.matmul.streamed import NAME

op = relax.op


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [
        ((1, 64), (64, 100), "float32"),  # columns that are not a multiple of the vector
        ((1, 5), (5, 700), "float32"),  # two blocks of columns, which overlap
        ((7, 101), (101, 40), "float32"),  # tiles of 4 and 3 rows; a last chunk of 5
        ((32, 40), (40, 24), "float64"),
        ((2, 33), (33, 17), "float64"),
        ((3, 1, 48), (48, 32), "float32"),  # rows of several matrices with one weight
        ((2, 3, 35), (1, 35, 16), "float32"),
        ((4, 2, 35), (4, 35, 24), "float32"),
        ((2, 3, 1, 70), (2, 3, 70, 16), "float32"),
    ],
    ids=str,
)
def test_no_operand_is_packed(x, y, dtype, target):
    inputs = [random(*x).astype(dtype), random(*y, seed=1).astype(dtype)]
    check(lambda builder, x, y: op.matmul(x, y), np.matmul, inputs, rule=NAME, target=target)


def test_an_epilogue_is_fused_and_columns_are_shared_by_threads():
    inputs = [random(2, 300), random(300, 5000, seed=1), random(5000, seed=2)]
    built = check(
        lambda b, x, y, bias: op.nn.relu(b.emit(op.add(b.emit(op.matmul(x, y)), bias))),
        lambda x, y, bias: np.maximum(x @ y + bias, 0),
        inputs,
        rule=NAME,
    )
    assert list(built.rules) == [NAME]
    assert "T.parallel(10)" in built.kernel().script()


def test_a_matrix_that_is_not_finite_spoils_its_own_columns_alone():
    x, y = random(2, 37), random(37, 20, seed=1)
    y[36, 3] = np.inf
    built = build(lambda builder, x, y: op.matmul(x, y), [x, y])
    finite = np.isfinite(built.run([x, y]))
    assert not finite[:, 3].any()
    assert np.delete(finite, 3, axis=1).all()


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((2, "k"), ("k", 40)),
        (("b", 3, 1, "k"), ("b", 3, "k", 64)),
        (("b", 2, 50), ("b", 50, 16)),
    ],
    ids=str,
)
def test_symbolic_reductions_and_batches(x, y):
    program = symbolic.build(
        lambda builder, x, y: op.matmul(x, y), [(x, "float32"), (y, "float32")], hint=70
    )
    assert program.rules == {NAME}
    for edge in symbolic.EDGES:
        sizes = {"k": edge, "b": 1 + edge % 3}
        inputs = [random(*(sizes.get(size, size) for size in shape)) for shape in (x, y)]
        symbolic.check(program, np.matmul, inputs)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((33, 64), (64, 48)),  # many rows
        ((17, 2, 64), (64, 48)),
        ((2, 64), (64, 3)),  # fewer columns than a vector
        ((1, 4, 64), (3, 64, 16)),  # one matrix for several
    ],
    ids=str,
)
def test_other_products_are_packed(x, y):
    built = build(lambda builder, x, y: op.matmul(x, y), [random(*x), random(*y, seed=1)])
    assert NAME not in built.rules


def test_weights_are_packed():
    x, y = random(4, 96), random(96, 80, seed=1)
    check(lambda builder, x, y: op.matmul(x, y), np.matmul, [x], [y], rule="matmul")


def test_strict_accuracy_packs_where_too_many_chunks_would_be_added():
    inputs = [random(2, 10_000), random(10_000, 16, seed=1)]
    with choosing(Choices(accuracy="strict")):
        assert NAME not in build(lambda builder, x, y: op.matmul(x, y), inputs).rules
    assert NAME in build(lambda builder, x, y: op.matmul(x, y), inputs).rules


def test_neon_multiplies_by_an_element_of_a_register():
    inputs = [random(2, 64), random(64, 64, seed=1)]
    built = build(lambda builder, x, y: op.matmul(x, y), inputs, target=NEON)
    assert built.rules == {NAME}
    assert "fmla" in built.assembly()
    assert not has_parallel_loop(built.kernel())
