"""Reductions along rows and across them, with every kind of tail."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, te, tirx

from tests.compiler.kernels.kernels import (
    NATIVE,
    TARGETS,
    build,
    check,
    has_parallel_loop,
    loops,
    random,
    widest_vector,
)
from tests.compiler.symbolic import EDGES
from tests.compiler.symbolic import build as build_for_any
from tests.compiler.symbolic import check as check_any
from tvmify.compiler.kernels.common import choice

op = relax.op


def _softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(2, 3, 64), (128, 5), (1, 1000)])
def test_softmax_of_rows(target, shape):
    built = check(
        lambda builder, x: op.nn.softmax(x, -1),
        lambda x: _softmax(x, -1),
        [random(*shape)],
        rule="reduction",
        target=target,
    )
    assert widest_vector(built.kernel()) > 1


@pytest.mark.parametrize("length", [1, 16, 17, 33, 34, 100, 130, 200, 403, 1000])
@pytest.mark.parametrize("describe", [op.nn.softmax, op.nn.log_softmax, op.sum, op.max])
def test_single_row_is_scheduled_as_a_row(describe, length):
    """TVM can reorder the loops of partial sums with a tail only inside another loop."""

    def vectors(*shape):
        built = build(lambda builder, x: describe(x, -1), [random(*shape)])
        assert built.rules == {"reduction"}
        kinds = [(loop.kind, int(loop.extent)) for loop in loops(built.kernel())]
        return [lanes for kind, lanes in kinds if kind == tirx.ForKind.VECTORIZED]

    assert vectors(length) == vectors(1, length)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [33, 130, 403])
def test_softmax_of_everything(target, length):
    built = check(
        lambda builder, x: op.nn.softmax(x, 0),
        lambda x: _softmax(x, 0),
        [random(length)],
        rule="reduction",
        target=target,
    )
    assert widest_vector(built.kernel()) > 1


def test_softmax_across_rows():
    check(
        lambda builder, x: op.nn.softmax(x, 1),
        lambda x: _softmax(x, 1),
        [random(2, 9, 5, 8)],
        rule="column reduction",
    )


@pytest.mark.parametrize(
    ("shape", "axes", "rule"),
    [
        ((6, 300), [1], "reduction"),
        ((4, 5, 6, 7), [2, 3], "reduction"),
        ((2, 33, 50), [1], "column reduction"),
        ((1, 7, 7, 40), [1, 2], "column reduction"),
        ((40, 7), [0], "column reduction"),
        ((3, 70), [0, 1], "reduction"),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_sums(shape, axes, rule, keep):
    built = build(lambda builder, x: op.sum(x, axes, keep), [random(*shape)])
    (used,) = built.rules
    assert used.startswith(rule)
    x = random(*shape)
    expected = x.astype(np.float64).sum(tuple(axes), keepdims=keep)
    np.testing.assert_allclose(built.run([x]), expected, rtol=1e-5, atol=1e-5)


def test_mean_of_everything_is_vectorized():
    built = check(
        lambda builder, x: op.mean(x),
        lambda x: np.array(x.mean()),
        [random(30, 100) + 1],
        rule="reduction",
    )
    assert widest_vector(built.kernel()) > 1


def test_overlapping_windows_are_not_rows():
    """A convolution without a template: its lanes are neighbouring results."""
    built = build(
        lambda builder, x, w: op.nn.conv3d(x, w, padding=1),
        [random(1, 4, 5, 6, 20), random(8, 4, 3, 3, 3, seed=1)],
    )
    assert built.rules == {"column reduction"}
    assert widest_vector(built.kernel()) > 1


@pytest.mark.parametrize(
    ("shape", "count"),
    [((2, 11, 100), 1), ((8, 5), 2), ((3, 7), 2), ((1, 17), 2), ((17, 1), 2), ((2, 13, 5), 3)],
)
def test_layer_norm(shape, count):
    axes = list(range(-count, 0))

    def describe(builder, x, scale, shift):
        return op.nn.layer_norm(x, scale, shift, axes)

    def reference(x, scale, shift):
        centred = x - x.mean(tuple(axes), keepdims=True)
        deviation = np.sqrt((centred**2).mean(tuple(axes), keepdims=True) + 1e-5)
        return centred / deviation * scale + shift

    own = shape[-count:]
    inputs = [random(*shape) + 30, random(*own, seed=1), random(*own, seed=2)]
    check(describe, reference, inputs, rule="reduction", tolerance=2e-5)


def test_argmax_takes_the_first():
    x = np.random.default_rng(0).integers(0, 5, (7, 50)).astype(np.float32)
    built = build(lambda builder, v: op.argmax(v, 1), [x])
    assert "unscheduled" not in built.report.values()
    np.testing.assert_array_equal(built.run([x]), x.argmax(1))


def test_scalar_reduction_of_a_repeated_operand():
    """It has no columns to use as lanes instead."""
    check(
        lambda builder, x: op.sum(builder.emit(op.broadcast_to(x, (7, 33, 65)))),
        lambda x: 7 * x.sum(),
        [random(33, 65) + 1],
        rule="reduction",
    )


@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_a_scalar_is_read_for_each_element(shape):
    """It has no axis to sum along."""
    x = np.full((), 1.5, np.float32)
    built = build(lambda builder, x: op.sum(builder.emit(op.broadcast_to(x, shape)), -1), [x])
    assert "unscheduled" not in built.report.values()
    np.testing.assert_allclose(built.run([x]), np.full(shape[:-1], 7.5))


def test_product_of_constants_reads_no_memory():
    two, three = (relax.const(value, "float32") for value in (2.0, 3.0))

    def describe(builder, x):
        factors = [builder.emit(op.full((33,), value)) for value in (two, three)]
        return op.add(builder.emit(op.matmul(*factors)), x)

    x = random(1)
    built = build(describe, [x])
    assert "unscheduled" not in built.report.values()
    np.testing.assert_allclose(built.run([x]), 198 + x)


def test_parallel_only_when_worth_it():
    def of(*shape):
        return build(lambda builder, x: op.nn.softmax(x, -1), [random(*shape)]).kernel()

    assert has_parallel_loop(of(512, 512))
    assert not has_parallel_loop(of(8, 40))


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_strict_mean_divides_by_the_element_count(axes):
    """Not by the number of elements that the program is tuned for."""
    with choice.choosing(choice.Choices("strict")):
        program = build_for_any(lambda _, x: op.mean(x, axes), [(("s0", "s1"), "float32")])
    for rows in EDGES:
        check_any(program, lambda x: x.mean(tuple(axes)), [random(rows, 5)])


def test_layer_norm_of_any_length():
    def reference(x, scale, shift):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift

    program = build_for_any(
        lambda _, x, scale, shift: op.nn.layer_norm(x, scale, shift, [-1]),
        [((3, "s0"), "float32"), (("s0",), "float32"), (("s0",), "float32")],
    )
    for length in EDGES:
        inputs = [random(3, length) + 3, random(length, seed=1), random(length, seed=2)]
        check_any(program, reference, inputs, tolerance=2e-5)


def test_long_sum_with_a_likely_singleton_axis():
    """Sums of sums are then along the other axis: along this one there would not be fewer."""

    def describe(builder, x):
        count, rows, columns = x.ty.shape.values
        shape = [count, rows - 1, columns]
        rest = builder.call_te(lambda x: te.compute(shape, lambda i, j, k: x(i, j + 1, k)), x)
        return op.sum(builder.emit(rest), [0, 1])

    program = build_for_any(describe, [((300, "s0", 24), "float32")], hint=2)
    for rows in (2, 3, 17):
        check_any(program, lambda x: x[:, 1:].sum((0, 1)), [random(300, rows, 24)])


@pytest.mark.parametrize("axes", [(1, 3), (0, 2), (0, 2, 3), (0, 3)])
def test_means_over_axes_that_are_no_neighbours(axes):
    """No loop covers several axes, since it would have to divide by their sizes."""
    program = build_for_any(
        lambda _, x: op.mean(x, list(axes)), [(("n", 5, "height", "width"), "float32")]
    )
    kernels = (f for _, f in program.ir_mod.functions_items() if isinstance(f, tirx.PrimFunc))
    assert not any("% width" in f.script() for f in kernels)
    for size in ((2, 2), (7, 9), (16, 17), (31, 8), (3, 97)):
        check_any(program, lambda x: x.mean(axes), [random(3, 5, *size)])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("describe", [op.nn.softmax, op.nn.log_softmax, op.max, op.mean, op.sum])
def test_stages_of_columns_share_tiles(describe, target):
    """Only tiles are allocated, nothing of the size of an argument."""
    program = build_for_any(
        lambda _, x: describe(x, 1), [(("n", 5, "height", "width"), "float32")], target=target
    )
    assert program.rules == {"column reduction"}
    functions = (f for _, f in program.ir_mod.functions_items() if isinstance(f, tirx.PrimFunc))
    kernels = [f for f in functions if "tirx.is_scheduled" in (f.attrs or {})]
    buffers = [buffer for kernel in kernels for buffer in kernel.body.block.alloc_buffers]
    assert buffers
    assert all(isinstance(size, tirx.IntImm) for buffer in buffers for size in buffer.shape)
    if target != NATIVE:
        return

    def reference(x):
        exponents = np.exp(x - x.max(1, keepdims=True))
        return {
            op.nn.softmax: lambda: _softmax(x, 1),
            op.nn.log_softmax: lambda: np.log(exponents / exponents.sum(1, keepdims=True)),
            op.max: lambda: x.max(1),
            op.mean: lambda: x.mean(1),
            op.sum: lambda: x.sum(1),
        }[describe]()

    for size in ((2, 2), (7, 9), (8, 8), (3, 43), (31, 33)):
        check_any(program, reference, [random(3, 5, *size)])
