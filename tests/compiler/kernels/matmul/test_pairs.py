"""Products of bfloat16: which are computed in pairs, by which instruction, and how exactly."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from tests.compiler.kernels.kernels import (
    AVX2,
    AVX512,
    NEON,
    TARGETS,
    build,
    check,
    random,
    runnable,
)
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op

PAIRS = tvm.target.Target(
    {
        "kind": "llvm",
        "mtriple": "x86_64-unknown-linux-gnu",
        "mcpu": "x86-64",
        "mattr": [*(str(name) for name in AVX512.attrs["mattr"]), "+avx512bf16"],
    }
)
needs_pairs = pytest.mark.skipif(not runnable("avx512bf16"), reason="no AVX-512 BF16")


def _narrow(*shape, seed=0):
    return random(*shape, seed=seed).astype(ml_dtypes.bfloat16)


def _wide(builder, x):
    """Return a tensor in float32, as the importer represents operands of products."""
    return builder.emit(op.astype(x, "float32"))


def _linear(builder, x, weight, bias):
    transposed = builder.emit(op.permute_dims(_wide(builder, weight), [1, 0]))
    product = builder.emit(op.matmul(_wide(builder, x), transposed))
    return op.nn.relu(builder.emit(op.add(product, bias)))


def _expected(x, weight, bias):
    return np.maximum(x @ weight.T + bias, 0)


def _operands(shape, columns):
    weights = [_narrow(columns, shape[-1], seed=1), random(columns, seed=2)]
    return [_narrow(*shape)], weights


def _in_pairs(built):
    return any(_in_pairs_of(function) for function in _functions(built))


@needs_pairs
@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((1, 64), 256),
        ((2, 33), 200),
        ((1, 1), 60),
        ((7, 1100), 155),
        ((130, 2053), 61),
        ((64, 4096), 64),
        ((2, 5, 70), 4),
        ((3, 2), 2),
        ((128, 768), 768),
        ((2, 3, 1, 9), 33),
    ],
)
def test_products(shape, columns):
    built = check(
        _linear,
        _expected,
        *_operands(shape, columns),
        rule="matmul",
        target=PAIRS,
    )
    assert _in_pairs(built)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 500, 155), (2, 33, 64), (4, 7, 5)])
def test_few_rows_without_the_instruction(monkeypatch, rows, depth, columns, target):
    operands = _operands((rows, depth), columns)
    near = build(_linear, *operands, target)
    assert not _in_pairs(near)  # L2 keeps the weights: nothing waits for them
    monkeypatch.setattr(Microarchitecture, "keeps", lambda self, size: False)
    distant = check(_linear, _expected, *operands, rule="matmul", target=target)
    assert _in_pairs(distant)


def test_instruction():
    text = build(_linear, *_operands((128, 768), 768), PAIRS).assembly()
    assert text.count("vdpbf16ps") >= 16
    assert "vfmadd" not in text


@pytest.mark.parametrize("target", [AVX2, NEON])
def test_no_instruction(target, monkeypatch):
    monkeypatch.setattr(Microarchitecture, "keeps", lambda self, size: False)
    one = build(_linear, *_operands((1, 768), 768), target)
    assert _in_pairs(one)
    assert "vdpbf16ps" not in one.assembly()
    assert not _in_pairs(build(_linear, *_operands((128, 768), 768), target))


@needs_pairs
def test_nan_and_infinities():
    x, weight = _narrow(6, 51), _narrow(40, 51, seed=1)
    x[0, 3], x[1, 50], x[2, 0], x[3, 7] = np.nan, np.inf, -np.inf, 0.0
    weight[5, 7], weight[6, 50], weight[7, 2] = np.inf, -np.inf, np.nan

    def product(builder, x, weight):
        transposed = builder.emit(op.permute_dims(_wide(builder, weight), [1, 0]))
        return op.matmul(_wide(builder, x), transposed)

    built = build(product, [x], [weight], PAIRS)
    assert _in_pairs(built)
    with np.errstate(invalid="ignore"):
        expected = x.astype(float) @ weight.astype(float).T
    actual = built.run([x], [weight])
    for kind in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(kind(actual), kind(expected))
    finite = np.isfinite(expected)
    assert np.allclose(actual[finite], expected[finite], rtol=0, atol=1e-5)


@needs_pairs
def test_merged_and_moved_weights():
    def merged(builder, x, first, second):
        both = builder.emit(op.concat([_wide(builder, first), _wide(builder, second)], axis=0))
        transposed = builder.emit(op.permute_dims(builder.emit(op.reshape(both, [60, 80])), [1, 0]))
        return op.matmul(_wide(builder, x), transposed)

    built = check(
        merged,
        lambda x, *weights: x @ np.concatenate(weights).T,
        [_narrow(9, 80)],
        [_narrow(40, 80, seed=1), _narrow(20, 80, seed=2)],
        rule="matmul",
        target=PAIRS,
    )
    assert _in_pairs(built)


@needs_pairs
def test_reshaped_rows():
    # As after attention, whose result is cast before its heads are joined.
    def product(builder, x, weight):
        joined = builder.emit(op.reshape(_wide(builder, x), [2, 5, 48]))
        return op.matmul(joined, _wide(builder, weight))

    x, weight = _narrow(2, 5, 6, 8), _narrow(48, 33, seed=1)
    built = build(product, [x], [weight], PAIRS)
    assert _in_pairs(built)
    expected = x.astype(float).reshape(2, 5, 48) @ weight.astype(float)
    assert np.allclose(built.run([x], [weight]), expected, rtol=0, atol=1e-5)


@needs_pairs
@pytest.mark.parametrize("which", ["weights", "rows"])
def test_intermediate_casts_round(which):
    # TVM drops a cast to bfloat16 and back within a function, and truncation is not rounding.
    numbers = random(35, 35, seed=3)
    specials = np.array([0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x7F800000], dtype=np.uint32)
    numbers[0, :4] = specials.view(np.float32)
    unit = np.eye(35).astype(ml_dtypes.bfloat16)

    def product(builder, x, weight):
        def wide(v):
            narrow = v if v.ty.dtype == "bfloat16" else builder.emit(op.astype(v, "bfloat16"))
            return _wide(builder, narrow)

        return op.matmul(wide(x), wide(weight))

    operands = ([unit], [numbers]) if which == "weights" else ([numbers], [unit])
    built = build(product, *operands, PAIRS)
    assert _in_pairs(built)
    actual = built.run(*operands)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
    finite = np.isfinite(expected).all(axis=0 if which == "weights" else 1)
    if which == "weights":
        assert np.array_equal(actual[:, finite], expected[:, finite])
        assert np.isnan(actual[:, :2]).all()
    else:
        assert np.array_equal(actual[finite], expected[finite])
        assert np.isnan(actual[0]).all()


def test_bfloat16_only():
    def of(rows, weights):
        def product(builder, x, weight):
            wide = [
                _wide(builder, v) if narrow else v for v, narrow in ((x, rows), (weight, weights))
            ]
            return op.matmul(*wide)

        kind = {True: _narrow, False: random}
        return build(product, [kind[rows](16, 64)], [kind[weights](64, 96, seed=1)], PAIRS)

    assert _in_pairs(of(rows=True, weights=True))
    assert not _in_pairs(of(rows=False, weights=True))
    assert not _in_pairs(of(rows=True, weights=False))


def test_activations_are_not_packed():
    def product(builder, x, y):
        return op.matmul(_wide(builder, x), _wide(builder, y))

    built = build(product, [_narrow(16, 64), _narrow(64, 96, seed=1)], target=PAIRS)
    assert not any(_in_pairs_of(function) for function in _functions(built))


def _functions(built):
    return [f for f in built.ir_mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]


def _in_pairs_of(function):
    return "add_dot(" in str(function)


@needs_pairs
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_convolutions_of_one_pixel(strides):
    def convolution(builder, image, weight):
        return op.nn.conv2d(
            _wide(builder, image),
            _wide(builder, weight),
            strides=strides,
            data_layout="NHWC",
            kernel_layout="OHWI",
        )

    down, across = strides
    built = check(
        convolution,
        lambda image, weight: np.einsum(
            "byxc,oc->byxo", image[:, ::down, ::across], weight[:, 0, 0]
        ),
        [_narrow(2, 9, 7, 31)],
        [_narrow(40, 1, 1, 31, seed=1)],
        rule="matmul",
        target=PAIRS,
    )
    assert _in_pairs(built)
