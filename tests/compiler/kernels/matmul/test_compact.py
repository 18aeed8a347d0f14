"""Compact weights: their errors, NaN and infinities, and where they are used."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from tvm import relax

from tests.compiler.kernels.kernels import AVX2, AVX512, NATIVE, NEON, TARGETS, build, check, random
from tvmify.compiler.costs import COMPACT
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.matmul import compact
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op


@pytest.fixture(autouse=True)
def distant(monkeypatch):
    """Assume that all weights come from memory."""
    monkeypatch.setattr(compact, "COMPACT", replace(COMPACT, distant=-1))
    monkeypatch.setattr(Microarchitecture, "keeps", lambda self, size: False)


def _linear(builder, x, weight, bias):
    product = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0]))))
    return op.nn.relu(builder.emit(op.add(product, bias)))


def _product(builder, x, weight):
    return op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0])))


def _is_compact(built):
    return any("pack_words" in name for name in built.report)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 64, 256), (2, 33, 200), (1, 1, 60), (1, 1100, 155), (2, 2053, 61), (1, 4096, 64)],
)
def test_products(rows, depth, columns, target):
    built = check(
        _linear,
        lambda x, weight, bias: np.maximum(x @ weight.T + bias, 0),
        [random(rows, depth)],
        [random(columns, depth, seed=1), random(columns, seed=2)],
        rule="matmul",
        target=target,
    )
    assert _is_compact(built)
    assert set(built.report.values()) <= {"matmul", "reduction", "elementwise"}


@pytest.mark.parametrize("shape", [(3, 64), (5, 1100), (5, 1, 33), (1, 5, 70), (2, 2, 1, 9)])
def test_more_rows_with_wider_vectors(monkeypatch, shape):
    wide = Microarchitecture.of(AVX512)
    monkeypatch.setattr(Microarchitecture, "of", lambda target: wide)
    weights = [random(120, shape[-1], seed=1)]
    built = check(
        _product, lambda x, weight: x @ weight.T, [random(*shape)], weights, rule="matmul"
    )
    assert _is_compact(built)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 1, 64), (3, 64, 120)),
        ((2, 1, 1, 33), (3, 33, 128)),
        ((1, 64), (1, 64, 60)),
        ((3, 1, 2053), (3, 2053, 60)),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_stacked_weights(left, right, target):
    inputs, weights = [random(*left)], [random(*right, seed=1)]
    weights[0][..., 5, :] *= 1e-4  # a row with another scale in each
    built = check(
        lambda builder, x, w: op.matmul(x, w),
        np.matmul,
        inputs,
        weights,
        rule="matmul",
        target=target,
    )
    assert _is_compact(built)


def test_rows_of_each_stacked_weight_count():
    def applies(*left):
        weights = [random(4, 64, 96, seed=1)]
        product = build(lambda builder, x, w: op.matmul(x, w), [random(*left)], weights, AVX2)
        return _is_compact(product)

    assert applies(4, 2, 64)
    assert not applies(4, 3, 64)
    assert applies(2, 4, 1, 64)  # two rows for each
    assert not applies(2, 4, 2, 64)


def _rows_of(weights):
    """Return the weight ``[columns, depth]`` that a kernel uses: its product with unit vectors."""
    depth = weights.shape[1]
    units = np.eye(depth, dtype="float32")
    built = build(_product, [units[:1]], [weights])
    assert _is_compact(built)
    return np.concatenate([built.run([units[k : k + 1]], [weights]) for k in range(depth)]).T


def test_weights_are_off_by_a_fraction_of_their_largest_neighbour():
    width = compact.VECTORS * Microarchitecture.of(NATIVE).lanes()
    weights = random(2 * width, 12, seed=1)
    weights[:, 3] *= 1e4  # a row with another scale
    weights[5, 4] = -1e4  # an outlier
    weights[:, 5] = 0
    weights[:, 6] *= 1e-42  # denormal
    weights[7, 7] = np.finfo("float32").max
    weights[8, 8] = np.finfo("float32").min
    weights[9, 9] = 1e-9  # too small for a fraction
    seen = _rows_of(weights)
    panels = np.abs(weights.astype("float64")).reshape(2, width, 12)
    largest = np.maximum(panels.max(axis=1, keepdims=True), 2.0**-120)
    largest *= 1 + 2.0**-23  # rounded by the product with the scale
    allowed = np.broadcast_to(largest * 2.0**-22, panels.shape).reshape(weights.shape)
    error = np.abs(seen.astype("float64") - weights)
    assert (error <= allowed).all()
    assert (seen[weights == 0] == 0).all()
    usual = np.sqrt(np.mean((error / allowed)[:, 0] ** 2))
    assert usual < 0.4  # most are rounded to the nearest fraction


def test_nan_and_infinities_stay_in_their_columns():
    weights = random(64, 6, seed=1)
    weights[3, 0] = np.nan
    weights[4, 1] = np.inf
    weights[[5, 31], 2] = -np.inf
    weights[6, 3] = 0
    weights[[7, 8], 4] = 1e-30, -1e-30  # tiny, but not zero: times infinity they are infinite
    weights[9, 4] = 1e20
    weights[[10, 11], 1] = 1e-30, -1e-30
    weights[63, [0, 1]] = np.inf
    x = np.ones((1, 6), "float32")
    built = build(_product, [x], [weights])
    for factor, k in product([1.0, -1.0, 0.0, np.inf, -np.inf, np.nan], range(5)):
        given = x.copy()
        given[0, k] = factor
        with np.errstate(invalid="ignore"):
            # One product at a time, as in eager: a library may skip zeros.
            expected = (weights * given).sum(axis=1, dtype="float32")[None]
        actual = built.run([given], [weights])
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        np.testing.assert_array_equal(np.isposinf(actual), np.isposinf(expected))
        np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))


def test_finite_products_stay_finite():
    weights = np.tile(np.float32([2, 0.5, 0, -0.25]), 16)[:, None]
    x = np.float32([[3e38]])
    actual = build(_product, [x], [weights]).run([x], [weights])[0]
    np.testing.assert_allclose(actual, np.tile([np.inf, 1.5e38, 0, -7.5e37], 16), rtol=1e-6)


def test_infinities_of_both_signs_in_one_row_of_a_panel():
    weights = random(64, 2, seed=1)
    weights[1, 0], weights[2, 0] = np.inf, -np.inf
    x = np.ones((1, 2), "float32")
    actual = build(_product, [x], [weights]).run([x], [weights])[0]
    assert np.isposinf(actual[1])
    assert np.isnan(actual[2])
    assert np.isfinite(np.delete(actual, [1, 2])).all()


def _applies(target=AVX2, *, rows=1, dtype="float32", accuracy="default"):
    x, weight = random(rows, 64).astype(dtype), random(96, 64, seed=1).astype(dtype)
    with choosing(Choices(accuracy=accuracy)):
        return _is_compact(build(_product, [x], [weight], target))


def test_few_rows_only():
    assert [rows for rows in range(1, 9) if _applies(AVX2, rows=rows)] == [1, 2]
    assert [rows for rows in range(1, 9) if _applies(AVX512, rows=rows)] == [1, 2, 3, 4, 5]


def test_not_where_it_would_harm():
    assert not _applies(accuracy="strict")
    assert not _applies(NEON)
    assert not _applies(dtype="float64")
    assert not _applies(dtype="float16")


def test_not_where_tiles_would_be_mostly_padding():
    def applies(columns):
        weights = [random(columns, 64, seed=1)]
        return _is_compact(build(_product, [random(1, 64)], weights, AVX2))

    assert [columns for columns in (4, 23, 24, 33, 47, 48, 71, 72) if applies(columns)] == [
        24,
        48,
        72,
    ]


def test_not_where_a_cache_holds_the_weights(monkeypatch):
    size = 64 * 96 * 4
    monkeypatch.setattr(compact, "COMPACT", replace(COMPACT, distant=size - 1))
    assert _applies()
    monkeypatch.setattr(compact, "COMPACT", replace(COMPACT, distant=size))
    assert not _applies()
    monkeypatch.undo()
    monkeypatch.setattr(compact, "COMPACT", replace(COMPACT, distant=size - 1))
    assert not _applies()  # L2 keeps the weights


def test_each_weight_counts_once_and_activations_do_not(monkeypatch):
    def twice(builder, x, weight):
        first = builder.emit(_product(builder, x, weight))
        scores = builder.emit(op.matmul(builder.emit(op.permute_dims(x, [1, 0])), x))
        return builder.emit(op.matmul(_product(builder, first, weight), scores))

    given = [random(1, 96)], [random(96, 96, seed=1)]
    monkeypatch.setattr(compact, "COMPACT", replace(COMPACT, distant=96 * 96 * 4 - 1))
    assert _is_compact(build(twice, *given))
    monkeypatch.setattr(compact, "COMPACT", replace(COMPACT, distant=96 * 96 * 4))
    assert not _is_compact(build(twice, *given))


@pytest.mark.parametrize(("target", "rows"), [(AVX2, 1), (AVX512, 1), (AVX512, 5)])
def test_all_words_are_fetched_ahead(target, rows):
    built = build(_product, [random(rows, 768)], [random(3072, 768, seed=1)], target)
    hot = max(built.assembly().split("\n.LBB"), key=lambda part: part.count("vfmadd"))
    hot = re.split(r"\tj\w+", hot)[0]
    steps = hot.count("vfmadd") // (rows * compact.VECTORS)
    assert steps > 0
    words = steps * 3 * Microarchitecture.of(target).vector_bits // 8
    assert hot.count("prefetcht0") == hot.count("prefetcht1") == words // 64
