"""Products of few rows with a transposed activation: tails, batches, symbols, and packed ones."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import (
    NATIVE,
    NEON,
    TARGETS,
    Array,
    build,
    check,
    has_parallel_loop,
    random,
)
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.matmul import dots
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op


def _scores(builder: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
    rank = len(y.ty.shape)
    transposed = op.permute_dims(y, [*range(rank - 2), rank - 1, rank - 2])
    return op.matmul(x, builder.emit(transposed))


def _reference(x: Array, y: Array) -> Array:
    return x @ np.swapaxes(y, -1, -2)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [
        ((1, 384), (50, 384), "float32"),
        ((3, 64), (37, 64), "float32"),
        ((8, 128), (5, 128), "float32"),
        ((5, 100), (9, 100), "float64"),
        ((2, 12), (3, 12), "float32"),
        ((1, 1, 96), (20, 96), "float32"),
        ((2, 96), (1, 20, 96), "float32"),
        ((6, 3, 64), (6, 11, 64), "float32"),
        ((2, 3, 1, 32), (2, 3, 19, 32), "float64"),
        ((3, 63), (30, 63), "float32"),
        ((1, 17), (30, 17), "float32"),
        ((2, 4, 128), (30, 128), "float32"),
        ((3, 1, 2, 96), (1, 1, 30, 96), "float32"),
        ((2, 20001), (5, 20001), "float32"),
    ],
    ids=str,
)
def test_no_operand_is_packed(x, y, dtype, target):
    inputs = [random(*x).astype(dtype), random(*y, seed=1).astype(dtype)]
    check(_scores, _reference, inputs, rule="dot products", target=target)


@pytest.mark.parametrize("depth", [1, 2, 7, 8, 9, 8191, 8193, 16384, 20001])
def test_a_symbolic_reduction_of_any_length(depth):
    program = symbolic.build(
        _scores, [(("m", "k"), "float32"), ((5, "k"), "float32")], hint=16, most=1 << 31
    )
    assert program.rules == {"dot products"}
    symbolic.check(program, _reference, [random(3, depth), random(5, depth, seed=1)])


def test_an_epilogue_is_fused_and_many_columns_are_shared_by_threads():
    inputs = [random(4, 384), random(20000, 384, seed=1), random(20000, seed=2)]
    built = check(
        lambda b, x, y, bias: op.nn.relu(b.emit(op.add(b.emit(_scores(b, x, y)), bias))),
        lambda x, y, bias: np.maximum(x @ y.T + bias, 0),
        inputs,
        rule="dot products",
    )
    assert has_parallel_loop(built.kernel())


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (("m", 96), ("n", 96)),
        ((3, 96), ("n", 96)),
        (("m", 96), (20, 96)),
        (("b", 2, 96), ("b", "n", 96)),
        (("b", "m", 96), ("n", 96)),
        (("m", "k"), ("n", "k")),
        ((3, "k"), (20, "k")),
        (("b", "m", "k"), ("b", "n", "k")),
        (("b", 1, "k"), ("n", "k")),
    ],
    ids=str,
)
def test_symbolic_sizes(x, y):
    program = symbolic.build(_scores, [(x, "float32"), (y, "float32")], hint=2)
    assert program.rules == {"dot products"}
    for edge in symbolic.EDGES:
        sizes = {"m": edge, "b": 3, "n": 33 - edge if edge < 32 else 2 * edge, "k": edge + 1}
        inputs = [random(*(sizes.get(size, size) for size in shape)) for shape in (x, y)]
        symbolic.check(program, _reference, inputs)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((129, 1024), (300, 1024)),  # many rows
        ((20, 64), (300, 64)),  # sums so short that adding lanes would take a third of the time
        ((1, 2), (300, 2)),  # no whole vectors
        ((2, 10, 64), (30, 64)),  # many rows in all
    ],
    ids=str,
)
def test_other_products_are_packed(x, y):
    assert "dot products" not in build(_scores, [random(*x), random(*y, seed=1)]).rules


def test_weights_are_packed():
    x, y = random(4, 384), random(500, 384, seed=1)
    check(_scores, _reference, [x], [y], rule="matmul")


def test_a_permutation_of_other_axes_is_not_a_transpose():
    x, y = random(5, 2, 64), random(64, 5, 7, seed=1)
    built = build(
        lambda builder, x, y: op.matmul(x, builder.emit(op.permute_dims(y, [1, 0, 2]))), [x, y]
    )
    assert "matmul" in built.rules


def test_strict_accuracy_adds_up_blocks():
    inputs = [random(2, 4096), random(30, 4096, seed=1)]

    def blocks(function: tirx.PrimFunc) -> int:
        return str(function).count("dots_lanes")

    assert not blocks(check(_scores, _reference, inputs, rule="dot products").kernel())
    with choosing(Choices(accuracy="strict")):
        strict = check(_scores, _reference, inputs, rule="dot products")
    assert blocks(strict.kernel())


@pytest.mark.parametrize("target", [NATIVE, NEON], ids=["native", "neon"])
def test_a_tile_leaves_registers_for_its_operands(target):
    machine = Microarchitecture.of(target)
    for rows in (1, 2, 3, 4, 5, 8, 32):
        tall, wide = dots.tile(rows, 1000, machine)
        assert tall <= rows
        assert tall * wide + min(tall, wide) < machine.vector_registers
