"""Matrix products: shapes, tails, epilogues, and the loops they become."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import (
    AVX2,
    AVX512,
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
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.common.rewriting import collect
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op


def _linear(builder, x, weight, bias):
    product = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0]))))
    return op.nn.relu(builder.emit(op.add(product, bias)))


def _linear_reference(x, weight, bias):
    return np.maximum(x @ weight.T + bias, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("lead", "depth", "columns"),
    [
        ((1,), 64, 200),
        ((7,), 33, 43),
        ((197,), 64, 96),
        ((3, 5), 40, 64),
        ((2, 3, 4), 17, 2),
        ((65,), 1, 130),
    ],
)
def test_packed_weights(target, lead, depth, columns):
    weights = [random(columns, depth, seed=1), random(columns, seed=2)]
    built = check(
        _linear,
        _linear_reference,
        [random(*lead, depth)],
        weights,
        rule="matmul",
        target=target,
    )
    assert widest_vector(built.kernel()) > 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3, 37, 33), (2, 3, 33, 19)),
        ((4, 1, 8, 16), (3, 16, 40)),
        ((100, 70), (70, 30)),
        ((6, 33, 64), (6, 64, 33)),
        ((2, 200, 8), (2, 8, 16)),
        ((5, 12, 24), (24, 48)),
    ],
)
def test_two_activations(left, right):
    check(
        lambda builder, a, b: op.matmul(a, b),
        np.matmul,
        [random(*left), random(*right, seed=1)],
        rule="matmul",
    )


def test_transposed_activation():
    def scores(builder, query, key):
        transposed = builder.emit(op.permute_dims(key, [0, 1, 3, 2]))
        product = builder.emit(op.matmul(query, transposed))
        return op.multiply(product, relax.const(0.125, "float32"))

    inputs = [random(2, 4, 40, 16), random(2, 4, 23, 16, seed=1)]
    built = build(scores, inputs)
    assert sorted(built.rules) == ["elementwise", "matmul"]
    expected = inputs[0] @ inputs[1].transpose(0, 1, 3, 2) * 0.125
    np.testing.assert_allclose(built.run(inputs), expected, rtol=1e-4, atol=1e-5)


def test_permuting_epilogue_is_fused():
    def heads(builder, x, weight):
        product = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0]))))
        return op.add(product, builder.emit(op.nn.gelu(product)))

    def reference(x, weight):
        from math import erf

        product = x @ weight.T
        return product + product * 0.5 * (1 + np.vectorize(erf)(product / np.sqrt(2)))

    built = check(heads, reference, [random(30, 24)], [random(50, 24, seed=1)], rule="matmul")
    assert len(built.rules) == 1


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_other_types(dtype):
    x = (random(9, 12) * 4).astype(dtype)
    weight = (random(20, 12, seed=1) * 4).astype(dtype)
    tolerance = {"float64": 1e-14, "float16": 1e-3, "int32": 0}[dtype]
    check(
        lambda builder, a, w: op.matmul(a, builder.emit(op.permute_dims(w, [1, 0]))),
        lambda a, w: a @ w.T,
        [x],
        [weight],
        rule="matmul",
        tolerance=tolerance,
    )


def test_vector_operands_are_reductions():
    check(
        lambda builder, a, b: op.matmul(a, b),
        np.matmul,
        [random(40, 300), random(300, seed=1)],
        rule="reduction",
    )


def test_sums_stay_in_registers():
    built = build(_linear, [random(128, 256)], [random(256, 256, seed=1), random(256, seed=2)])
    kernel = built.kernel()
    unrolled = [int(x.extent) for x in loops(kernel) if x.kind == tirx.ForKind.UNROLLED]
    assert max(unrolled) >= 4  # rows of the tile
    assert "local" in kernel.script()


def _hot_loop(built):
    """The lines of the loop with most multiply-adds among its instructions."""
    lines = built.assembly().splitlines()
    starts = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    found = []
    for end, line in enumerate(lines):
        jump = re.match(r"\tj\w+\t(\.L\w+)$", line)
        if jump and starts.get(jump[1], end) < end:
            found.append(lines[starts[jump[1]] + 1 : end + 1])
    return max(found, key=lambda loop: sum("vfmadd" in line for line in loop) / len(loop))


@pytest.mark.parametrize(
    ("target", "depth", "steps"), [(AVX2, 128, 4), (AVX2, 126, 3), (AVX2, 127, 1), (AVX512, 128, 2)]
)
def test_an_iteration_takes_several_steps_in_registers(target, depth, steps):
    # 6 × 16 sums with AVX2, 9 × 48 with AVX-512.
    weights = [random(480, depth, seed=1), random(480, seed=2)]
    loop = _hot_loop(build(_linear, [random(90, depth)], weights, target))
    vectors = 12 if target is AVX2 else 27
    assert sum("vfmadd" in line for line in loop) == steps * vectors
    assert not any("(%rsp)" in line for line in loop)  # nothing is spilled


@pytest.mark.parametrize(
    ("tile", "steps"),
    [
        (tiles.Tile(6, 16), 4),
        (tiles.Tile(4, 24), 1),
        (tiles.Tile(9, 8), 4),
        (tiles.Tile(13, 8), 1),
    ],
)
def test_no_second_step_without_a_register_for_it(tile, steps):
    assert tiles.steps(tile, Microarchitecture.of(AVX2), 32, 128) == steps


def _prefetches(built):
    return built.kernel().script().count("T.prefetch(")


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(64, 512, 512), (49, 672, 192), (49, 256, 512)]
)
def test_a_panel_that_tiles_share_stays_in_l1(rows, depth, columns):
    machine = Microarchitecture.of(AVX512)
    work = plans.Workload(1, rows, columns, depth, "float32", True)
    plan = plans.choose(work, machine, 32)
    assert plan.block > 1
    assert plan.depth * plan.columns * 4 <= 1.5 * machine.l1_bytes


def test_weights_are_fetched_ahead():
    def of(rows, columns):
        weights = [random(columns, 128, seed=1), random(columns, seed=2)]
        inputs = [random(rows, 128)]
        check(_linear, _linear_reference, inputs, weights, rule="matmul", target=NATIVE)
        return build(_linear, inputs, weights, AVX2)

    assert _prefetches(of(64, 512)) > 0
    # A single tile prefetches many weights, but not a few, which are in L2.
    assert _prefetches(of(4, 512)) == 0
    assert _prefetches(of(4, 8192)) > 0
    # With one row, a core reads so far ahead that prefetches would only delay it.
    assert _prefetches(of(1, 8192)) == 0


@pytest.mark.parametrize("target", [AVX2, AVX512])
def test_few_of_any_number_of_rows_fetch_all_of_a_panel(target):
    weights = [random(512, 128, seed=1), random(512, seed=2)]
    static = build(_linear, [random(12, 128)], weights, target)  # two tiles
    program = symbolic.build(_linear, [(("n", 128), "float32")], weights, target=target)
    assert program.ir_mod.script().count("T.prefetch(") >= _prefetches(static) > 0


@pytest.mark.parametrize("target", [AVX2, AVX512])
def test_a_tile_and_a_short_one_each_fetch_all_of_a_panel(target):
    weights = [random(512, 1024, seed=1), random(512, seed=2)]
    program = symbolic.build(_linear, [(("n", 1024), "float32")], weights, target=target, hint=32)
    branches: list[tirx.IfThenElse] = []
    for _, function in program.ir_mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            branches += collect(function.body, tirx.IfThenElse)
    few = [b for b in branches if isinstance(b.condition, tirx.LE) and _is_prefetch(b.then_case)]
    assert len(few) > 1  # in a tile, and in its versions with fewer rows
    for branch in few:
        assert branch.then_case.script().count("prefetch") > branch.else_case.script().count(
            "prefetch"
        )


def _is_prefetch(stmt: tirx.Stmt) -> bool:
    return "T.prefetch" in stmt.script().splitlines()[-1]


def test_tiles_suit_all_numbers_of_rows_of_a_class():
    work = plans.Workload(1, 48, 384, 384, "float32", True)
    for target in (AVX2, AVX512):
        plan = plans.choose_for_any_rows(work, 1, Microarchitecture.of(target), 32)
        assert -(-17 // plan.rows) * plan.rows == 18


@pytest.mark.parametrize(("target", "lines"), [(AVX2, 2), (AVX512, 1)])
def test_rows_are_fetched_ahead_where_few_columns_need_them(target, lines):
    # An iteration takes four steps of 6 rows with AVX2, two with AVX-512; a line has 16 elements.
    # These weights stay in L2; otherwise, two blocks are prefetched at a time.
    def prefetches(columns):
        weights = [random(columns, 64, seed=1), random(columns, seed=2)]
        inputs = [random(64, 64)]
        if target is NATIVE:
            check(_linear, _linear_reference, inputs, weights, rule="matmul", target=target)
        return _prefetches(build(_linear, inputs, weights, target))

    assert prefetches(64) == prefetches(1024) + lines


def test_both_orders_of_rows_and_columns():
    # Weights too large to be read again, then so small that rows come first; all with tails.
    for rows, depth, columns in [(45, 1030, 300), (1000, 70, 40)]:
        weights = [random(columns, depth, seed=1), random(columns, seed=2)]
        check(_linear, _linear_reference, [random(rows, depth)], weights, rule="matmul")


@pytest.mark.parametrize("depth", [384, 389, 390])
def test_every_candidate_is_right(depth):
    weights = [random(100, depth, seed=1), random(100, seed=2)]
    inputs = [random(50, depth)]
    with choosing(Choices()) as collected:
        build(_linear, inputs, weights)
    ((workload, names),) = collected.candidates.items()
    assert len(set(names)) == len(names) > 2
    for name in names[1:]:
        with choosing(Choices(measured={workload: name})):
            check(_linear, _linear_reference, inputs, weights, rule="matmul")


@pytest.mark.parametrize(("depth", "row_stride"), [(1024, 1), (2048, 1), (512, 2)])
def test_tiles_of_rows_in_one_set_of_l1_are_low(depth, row_stride):
    machine = Microarchitecture.of(AVX512)

    def rows(depth, row_stride=1):
        work = plans.Workload(1, 196, 512, depth, "float32", True, row_stride)
        return plans.choose(work, machine, 32).rows

    assert rows(960) > 10  # tiles of 14 divide 196
    assert rows(512) > 10
    assert rows(depth, row_stride) <= 10


def test_blocks_of_a_panel_are_a_little_larger_than_l1():
    machine = Microarchitecture.of(AVX2)
    plan = plans.choose(plans.Workload(1, 64, 768, 3072, "float32", True), machine, 32)
    assert 1 <= plan.depth * plan.columns * 4 / machine.l1_bytes < 2


@pytest.mark.parametrize(("rows", "most"), [(4, 4), (9, 3)])
def test_few_rows_are_a_single_tile(rows, most):
    # More would leave a tile of 16 registers too few columns.
    work = plans.Workload(1, rows, 3072, 768, "float32", True)
    plan = plans.choose(work, Microarchitecture.of(AVX2), 32)
    assert (plan.rows, plan.block) == (most, rows // most)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("depth", [4096, 4099])
@pytest.mark.parametrize(("accuracy", "tolerance"), [("default", 1.5e-6), ("strict", 4e-7)])
def test_long_sums_are_made_of_short_ones(rows, depth, accuracy, tolerance):
    def product(builder, x, weight):
        return op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0])))

    inputs, weights = [random(rows, depth)], [random(64, depth, seed=1)]
    with choosing(Choices(accuracy=accuracy)):
        check(product, lambda x, w: x @ w.T, inputs, weights, rule="matmul", tolerance=tolerance)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3, 37, 192), (2, 3, 192, 19)),
        ((2, 3, 37, 197), (2, 3, 197, 19)),
        ((100, 199), (199, 90)),
    ],
)
def test_two_activations_in_blocks(left, right):
    inputs = [random(*left), random(*right, seed=1)]
    with choosing(Choices(accuracy="strict")):
        check(lambda builder, a, b: op.matmul(a, b), np.matmul, inputs, rule="matmul")


def test_partial_last_block_ignores_infinities():
    def product(builder, x, weight):
        return op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0])))

    x, weight = np.ones((8, 1031), "float32"), np.ones((64, 1031), "float32")
    x[:, -1] = np.inf
    with choosing(Choices(accuracy="strict")):
        built = build(product, [x], [weight])
    assert np.isposinf(built.run([x], [weight])).all()


def test_parallel_only_when_worth_it():
    def of(rows, depth, columns, target=NATIVE):
        weights = [random(columns, depth, seed=1), random(columns, seed=2)]
        return build(_linear, [random(rows, depth)], weights, target).kernel()

    assert has_parallel_loop(of(256, 512, 512))
    one_core = tvm.target.Target({**NATIVE.export(), "num-cores": 1})
    assert not has_parallel_loop(of(256, 512, 512, one_core))
    assert not has_parallel_loop(of(4, 32, 32))


def test_neon_multiplies_and_adds_vectors():
    built = build(_linear, [random(16, 64)], [random(40, 64, seed=1), random(40, seed=2)], NEON)
    assert built.rules == {"matmul"}
    assert re.search(r"fmla\tv\d+\.4s", built.assembly())
