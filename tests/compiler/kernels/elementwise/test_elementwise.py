"""Kernels without sums: chains, broadcasts, permutations, gathers, concatenations."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import Tensor
from tvm import relax, te, tirx
from tvm.script import tirx as T

from tests.compiler.kernels.kernels import (
    NATIVE,
    NEON,
    TARGETS,
    build,
    check,
    has_parallel_loop,
    loops,
    random,
    widest_vector,
)
from tests.compiler.programs import check as check_program
from tests.compiler.programs import scheduled
from tvmify.compiler.kernels.common.rewriting import collect
from tvmify.compiler.pipeline import schedule

op = relax.op


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(3,), (2, 3, 37), (130, 1)])
def test_chain_with_broadcast(target, shape):
    check(
        lambda builder, x, y: op.multiply(
            builder.emit(op.add(x, y)), builder.emit(op.sigmoid(builder.emit(op.negative(x))))
        ),
        lambda x, y: (x + y) / (1 + np.exp(x)),
        [random(*shape), random(shape[-1], seed=1)],
        rule="elementwise",
        target=target,
    )


def test_a_chain_that_reads_everything_twice_is_not_written_out():
    """Thirty lines of it would be an expression with a billion terms."""

    def doubled(builder, x):
        for _ in range(30):
            x = builder.emit(op.subtract(builder.emit(op.add(x, x)), x))
        return x

    check(doubled, lambda x: x, [random(3, 8)], rule="elementwise")


def test_functions_of_long_expressions_are_not_written_out():
    def each(builder, x):
        for _ in range(4):
            x = builder.emit(op.subtract(builder.emit(op.multiply(x, x)), x))
        return op.log(builder.emit(op.add(builder.emit(op.exp(x)), relax.const(1.0))))

    def expected(x):
        for _ in range(4):
            x = x * x - x
        return np.log(np.exp(x) + 1)

    check(each, expected, [random(3)], rule="elementwise")


def _spread(mask: Tensor) -> Tensor:
    """Whether any of the nine elements of a window is true, without the border of a mask."""
    mask = mask[:, :-2] | mask[:, 1:-1] | mask[:, 2:]
    return mask[:, :, :-2] | mask[:, :, 1:-1] | mask[:, :, 2:]


def _spread_of_numbers(x: Tensor) -> Tensor:
    return _spread(F.pad((~torch.isfinite(x)).to(x.dtype), (1, 1, 1, 1), mode="reflect") != 0)


def _spread_of_mirrored(x: Tensor) -> Tensor:
    mirrored = F.pad(F.pad(x, (2, 2, 2, 2), mode="reflect"), (1, 1, 1, 1), mode="reflect")
    return torch.where(_spread(mirrored > 0)[:, 2:-2, 2:-2], x, -x)


@pytest.mark.parametrize("program", [_spread_of_numbers, _spread_of_mirrored])
def test_conditions_in_numbers_and_in_indices_are_not_written_out(program):
    """As in a median filter. As one expression, the first takes TVM's simplifier minutes."""
    x = torch.randn(2, 12, 12)
    x[0, 3, 4], x[1, 0, 7] = torch.inf, torch.nan
    ir_mod, _ = scheduled(program, x)
    kernels = [f for f in ir_mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    stores = [store for f in kernels for store in collect(f.body, tirx.BufferStore)]
    conditions = [len(collect(store.value, (tirx.Select, tirx.Cast))) for store in stores]
    assert max(conditions) < 100, conditions
    check_program(program, x)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 5, 3, 16), [0, 2, 1, 3]), ((3, 20, 33), [0, 2, 1]), ((1, 3, 10, 10), [0, 2, 3, 1])],
)
def test_permutation(shape, axes):
    check(
        lambda builder, x: op.permute_dims(x, axes),
        lambda x: x.transpose(axes),
        [random(*shape)],
        rule="elementwise",
    )


def _swapped(target, *shape):
    """Return the loops of a kernel that exchanges the first two of three axes."""
    built = check(
        lambda builder, x: op.permute_dims(x, [1, 0, 2]),
        lambda x: x.transpose(1, 0, 2),
        [random(*shape)],
        rule="elementwise",
        target=target,
    )
    return loops(built.kernel())


@pytest.mark.parametrize("target", TARGETS)
def test_the_vectors_of_a_row_are_a_loop_of_their_own(target):
    rows, vectors, lanes, *tail = _swapped(target, 5, 7, 131)
    assert (int(rows.extent), rows.kind) == (35, tirx.ForKind.SERIAL)
    assert int(vectors.extent) == -(-131 // int(lanes.extent))
    assert [int(loop.extent) for loop in tail] == [2, 1]


@pytest.mark.parametrize("target", TARGETS)
def test_threads_share_parts_of_rows_if_there_are_few(target):
    parts, vectors, lanes = _swapped(target, 2, 3, 96000)
    assert parts.kind == tirx.ForKind.PARALLEL
    assert 16 <= int(parts.extent) < 64
    assert int(parts.extent) * int(vectors.extent) * int(lanes.extent) == 6 * 96000


def test_concatenation_and_split():
    check(
        lambda builder, x, y: op.concat([x, y], 1),
        lambda x, y: np.concatenate([x, y], 1),
        [random(2, 5, 33), random(2, 4, 33, seed=1)],
        rule="elementwise",
    )


def test_gather_of_rows():
    table, index = random(30, 24), np.array([3, 0, 29, 7, 7], "int64")
    built = build(lambda builder, t, i: op.take(t, i, 0), [table, index])
    assert built.rules == {"elementwise"}
    np.testing.assert_array_equal(built.run([table, index]), table[index])


def test_reduction_over_no_elements_is_its_initial_value():
    x = random(3, 0, 5).astype("int64")
    built = build(lambda builder, x: op.bitwise_not(builder.emit(op.max(x, 1))), [x])
    assert "empty" in built.rules
    np.testing.assert_array_equal(built.run([x]), np.full((3, 5), np.iinfo("int64").max))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float64", "float16"])
def test_types(dtype):
    x = (random(5, 13) * 8).astype(dtype)
    y = (random(5, 13, seed=1) * 8).astype(dtype)
    built = build(lambda builder, a, b: op.where(op.equal(a, b), a, b), [x, y])
    assert built.rules == {"elementwise"}
    np.testing.assert_array_equal(built.run([x, y]), np.where(x == y, x, y))


def test_one_vector_per_iteration_and_one_pass():
    x = random(8, 512)
    built = build(lambda builder, v: op.exp(builder.emit(op.add(v, v))), [x])
    lanes = widest_vector(built.kernel())
    assert lanes == 16 if "+avx512f" in str(NATIVE) else 8


def test_parallel_only_when_worth_it():
    def of(*shape):
        return build(lambda builder, x: op.add(x, x), [random(*shape)]).kernel()

    assert has_parallel_loop(of(1024, 1024))
    assert not has_parallel_loop(of(16, 64))


def test_expensive_broadcast_is_computed_once():
    def describe(builder, image, gate):
        return op.multiply(image, builder.emit(op.sigmoid(gate)))

    inputs = [random(1, 20, 20, 16), random(1, 1, 1, 16, seed=1)]
    built = build(describe, inputs)
    np.testing.assert_allclose(
        built.run(inputs), inputs[0] / (1 + np.exp(-inputs[1])), rtol=1e-5, atol=1e-6
    )


@T.prim_func(private=True, s_tir=True)
def _one_after_the_other(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    """Loops within a block, which no rule can transform."""
    with T.sblock("root"), T.sblock("all"):
        T.reads(a[0:4])
        T.writes(b[0:4])
        for i in range(4):
            b[i] = a[i] + 1.0


def test_unscheduled_function_is_counted_and_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TVMIFY_STRICT_COMPILER")
    claims = _one_after_the_other.with_attr("tirx.is_scheduled", True)
    before = tvm.IRModule({"plain": _one_after_the_other, "claims": claims})
    after, outcomes = schedule(tvm.IRModule(before.functions), NATIVE)
    for outcome in (outcomes["plain"], outcomes["claims"]):
        assert outcome.rule is None
        assert [failure.rule for failure in outcome.failures] == ["elementwise"]
        assert "'all' has 0 loops" in str(outcome)
    tvm.ir.assert_structural_equal(after, before)


def test_one_element_needs_no_loop():
    built = check(lambda builder, x: op.exp(x), np.exp, [random()], rule="elementwise")
    assert not loops(built.kernel())


@pytest.mark.parametrize("size", [5, 33])
def test_diagonals(size):
    def describe(builder, x):
        return builder.call_te(lambda t: te.compute((size,), lambda i: t[i, i]), x)

    check(describe, np.diagonal, [random(size, size)], rule="elementwise")


#: The second axis of the latter, `ax1`, must not be confused with `ax10` and `ax11`.
THREE_AXES, TWELVE_AXES = (2, 3, 40), (2, *[1] * 9, 3, 40)


def test_concatenated_parts_are_separate_loops():
    def kernel(*shape):
        return check(
            lambda builder, x, y: op.concat([x, y], -1),
            lambda x, y: np.concatenate([x, y], -1),
            [random(*shape), random(*shape, seed=1)],
            rule="elementwise",
        ).kernel()

    assert len(loops(kernel(*TWELVE_AXES))) == len(loops(kernel(*THREE_AXES)))


@pytest.mark.parametrize("n_parts", [2, 25])
def test_parts_of_a_concatenation_are_loops_under_a_condition_on_values(n_parts):
    def describe(builder, *parts):
        joined = builder.emit(op.concat(parts, -1))
        zero = relax.const(0.0)
        return op.where(builder.emit(op.less(joined, zero)), zero, joined)

    kernel = check(
        describe,
        lambda *parts: np.concatenate(parts, -1).clip(0),
        [random(6, 32, seed=seed) for seed in range(n_parts)],
        rule="elementwise",
    ).kernel()
    vectors = [loop for loop in loops(kernel) if loop.kind == tirx.ForKind.VECTORIZED]
    assert len(vectors) == n_parts
    # Each reads its own part and the zero.
    assert all(len(loop.body.block.reads) == 2 for loop in vectors)


def test_a_border_of_ones_is_a_condition_that_turns_twice():
    """As when a model marks its padding: three pieces, not two."""

    def bordered(x):
        def element(row, column):
            inside = tirx.all(column >= 1, column < 17)
            return tirx.if_then_else(inside, x[row, column - 1], tirx.const(0.0))

        return te.compute((2, 19), element)

    def describe(builder, x):
        ones = builder.emit(op.full((2, 16), relax.const(1.0)))
        inside = builder.emit(op.greater(builder.emit_te(bordered, ones), relax.const(0.0)))
        return op.where(inside, builder.emit_te(bordered, x), relax.const(0.5))

    def expected(x):
        return np.pad(x, ((0, 0), (1, 2)), constant_values=0.5)

    check(describe, expected, [random(2, 16)], rule="elementwise")


@pytest.mark.parametrize(("columns", "unrolled"), [(5, []), (10, [2])])
def test_only_loops_that_decide_conditions_are_unrolled(columns, unrolled):
    """As when a weight is packed for a matrix product, with columns padded to whole vectors."""
    panels = -(-columns // 8)

    def panels_of(x):
        def element(panel, k, lane):
            column = panel * 8 + lane
            return tirx.if_then_else(column < columns, x[column, k], tirx.const(0.0))

        return te.compute((panels, 32, 8), element)

    def expected(x):
        padded = np.pad(x, ((0, 8 * panels - columns), (0, 0)))
        return padded.reshape(panels, 8, 32).swapaxes(1, 2)

    built = check(
        lambda builder, x: builder.emit_te(panels_of, x),
        expected,
        [random(columns, 32)],
        rule="elementwise",
    )
    found = [loop for loop in loops(built.kernel()) if loop.kind == tirx.ForKind.UNROLLED]
    assert [int(loop.extent) for loop in found] == unrolled


def test_inverse_permutation_is_one_pass():
    def kernel(*shape):
        *others, a, b = range(len(shape))

        def describe(builder, x):
            transposed = builder.emit(op.permute_dims(x, [*others, b, a]))
            return op.permute_dims(builder.emit(op.flip(transposed, a)), [*others, b, a])

        return check(
            describe, lambda x: np.flip(x, -1), [random(*shape)], rule="elementwise"
        ).kernel()

    assert len(loops(kernel(*TWELVE_AXES))) == len(loops(kernel(*THREE_AXES)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(64, 48), (40, 33), (9, 70)])
def test_transposes_read_whole_vectors(target, shape):
    built = check(
        lambda builder, x, y: op.add(builder.emit(op.permute_dims(x)), y),
        lambda x, y: x.T + y,
        [random(*shape), random(*shape[::-1], seed=1)],
        rule="elementwise",
        target=target,
    )
    assert "local" in str(built.kernel())


def test_neon_transposes_tile_by_tile():
    built = build(lambda builder, x: op.permute_dims(x), [random(64, 64)], target=NEON)
    assert widest_vector(built.kernel()) == 4
    assert "ldr\tq" in built.assembly() or "ldp\tq" in built.assembly()


@pytest.mark.parametrize("dtype", ["float32", "int8", "int16"])
def test_vectors_hold_several_pairs(dtype):
    x = (random(5, 40) * 8).astype(dtype)
    pairs = build(lambda _, x: op.flip(x, 2), [x.reshape(5, 20, 2)])
    np.testing.assert_array_equal(pairs.run([x.reshape(5, 20, 2)]), x.reshape(5, 20, 2)[:, :, ::-1])
    assert widest_vector(pairs.kernel()) > 2


def test_pairs_of_narrow_numbers_may_consist_of_two_tensors():
    x = (random(5, 40) * 8).astype("int8")

    def paired(builder, x):
        column = builder.emit(op.expand_dims(x, 2))
        return op.concat([column, builder.emit(op.add(column, column))], 2)

    pairs = build(paired, [x])
    np.testing.assert_array_equal(pairs.run([x]), np.stack([x, x + x], 2))
    assert widest_vector(pairs.kernel()) > 2
