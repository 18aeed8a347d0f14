"""Each kind of kernel with symbols among its sizes, at the edges of tiles and vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from tvm import relax, te

from tests.compiler.kernels.kernels import Array, random
from tests.compiler.symbolic import EDGES, build, check

op = relax.op
_WEIGHTS = [random(96, 64, seed=seed) / 8 for seed in (1, 2, 3)]
_FLOAT = "float32"


class Case(NamedTuple):
    """A computation, its inputs, the same in NumPy, and the rules that have to schedule it."""

    describe: Callable[..., Any]
    inputs: Sequence[tuple[Sequence[int | str], str]]
    reference: Callable[..., Any]
    rules: set[str]
    weights: Sequence[Array] = ()
    tolerance: float = 5e-6


def _softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _linear(builder, x, weight):
    return builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0]))))


def _rectified(builder, x, weight):
    return op.nn.relu(_linear(builder, x, weight))


def _products(builder, x, *weights):
    return relax.Tuple([_linear(builder, x, weight) for weight in weights])


def _gated(builder, x, gate, up):
    gate = builder.emit(op.nn.silu(_linear(builder, x, gate)))
    return op.multiply(gate, _linear(builder, x, up))


def _gated_reference(x, gate, up):
    gate = x @ gate.T
    return gate / (1 + np.exp(-gate)) * (x @ up.T)


def _attention(builder, query, key, value):
    transposed = builder.emit(op.permute_dims(key, [0, 1, 3, 2]))
    scores = builder.emit(op.matmul(query, transposed))
    return op.matmul(builder.emit(op.nn.softmax(scores)), value)


def _attention_reference(query, key, value):
    return _softmax(query @ key.swapaxes(-1, -2)) @ value


def _causal(builder, x):
    (length,) = x.ty.shape.values
    positions = builder.call_te(lambda: te.compute([length], lambda i: i, name="arange"))
    positions = builder.emit(positions)
    across, down = (builder.emit(op.expand_dims(positions, axis)) for axis in (0, 1))
    return op.less_equal(across, down)


def _heads(builder, x):
    batch, length, _ = x.ty.shape.values
    return op.permute_dims(builder.emit(op.reshape(x, [batch, length, 4, 16])), [0, 2, 1, 3])


def _together(builder, x):
    batch, heads, length, size = x.ty.shape.values
    transposed = builder.emit(op.permute_dims(x, [0, 2, 1, 3]))
    return op.reshape(transposed, [batch, length, heads * size])


def _narrow(builder, x, weight):
    wide = [builder.emit(op.astype(y, "bfloat16")) for y in (x, weight)]
    return op.matmul(*(builder.emit(op.astype(y, _FLOAT)) for y in wide))


def _where(_, mask, x):
    return op.where(mask, x, relax.const(-1e9, _FLOAT))


def _variance(builder, x):
    centred = builder.emit(op.subtract(x, builder.emit(op.mean(x, -1, True))))
    return op.mean(builder.emit(op.square(centred)), -1)


def _pooled(builder, x, mask):
    mask = builder.emit(op.abs(mask))
    kept = builder.emit(op.multiply(x, builder.emit(op.expand_dims(mask, -1))))
    total, count = builder.emit(op.sum(kept, 1)), builder.emit(op.sum(mask, 1, True))
    return op.divide(total, count)


def _pooled_reference(x, mask):
    mask = np.abs(mask)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def _with_cache(builder, query, keys, key, values, value):
    keys = builder.emit(op.concat([keys, key], 2))
    values = builder.emit(op.concat([values, value], 2))
    return relax.Tuple([keys, builder.emit(_attention(builder, query, keys, values))])


def _with_cache_reference(query, keys, key, values, value):
    keys, values = np.concatenate([keys, key], 2), np.concatenate([values, value], 2)
    return keys, _attention_reference(query, keys, values)


def _last_linear(builder, x, weight):
    last = builder.emit(op.strided_slice(x, [1], [-1], [2**31 - 1]))
    return _linear(builder, builder.emit(op.squeeze(last, [1])), weight)


def _first_left_out(builder, x, weight):
    rows, width = x.ty.shape.values
    rest = builder.call_te(lambda t: te.compute([rows - 1, width], lambda i, j: t(i + 1, j)), x)
    return _linear(builder, builder.emit(rest), weight)


def _with_bias(builder, x, weight, bias):
    return op.add(_linear(builder, x, weight), bias)


def _over_one_more(builder, x, last):
    keys = builder.emit(op.concat([x, last], 0))
    scores = builder.emit(op.matmul(x, builder.emit(op.permute_dims(keys))))
    return op.matmul(builder.emit(op.nn.relu(scores)), keys)


def _over_one_more_reference(x, last):
    keys = np.concatenate([x, last])
    return np.maximum(x @ keys.T, 0) @ keys


_ONE, _PAST = ((1, 2, 1, 16), _FLOAT), ((1, 2, "s0", 16), _FLOAT)
_BATCH = ("s0", "s1", 64)
_ELEMENTWISE, _REDUCTION, _MATMUL = {"elementwise"}, {"reduction"}, {"matmul"}
CASES = {
    "softmax along rows": Case(
        lambda _, x: op.nn.softmax(x), [((2, "s0", "s0"), _FLOAT)], _softmax, _REDUCTION
    ),
    "softmax of rows": Case(
        lambda _, x: op.nn.softmax(x), [(_BATCH, _FLOAT)], _softmax, _REDUCTION
    ),
    "sum along": Case(
        lambda _, x: op.sum(x, -1), [((4, "s0"), _FLOAT)], lambda x: x.sum(-1), _REDUCTION
    ),
    "max along": Case(
        lambda _, x: op.max(x, -1), [((4, "s0"), _FLOAT)], lambda x: x.max(-1), _REDUCTION
    ),
    "mean along": Case(
        lambda _, x: op.mean(x, -1), [(("s1", "s0"), _FLOAT)], lambda x: x.mean(-1), _REDUCTION
    ),
    "mean across": Case(
        lambda _, x: op.mean(x, 1),
        [((3, "s0", 40), _FLOAT)],
        lambda x: x.mean(1),
        {"column reduction"},
    ),
    "max across": Case(
        lambda _, x: op.max(x, 1),
        [((3, "s0", 40), _FLOAT)],
        lambda x: x.max(1),
        {"column reduction"},
    ),
    "sum of all": Case(lambda _, x: op.sum(x), [(("s0", 40), _FLOAT)], np.sum, _REDUCTION),
    "largest place": Case(
        lambda _, x: op.argmax(x, -1), [(("s0", 64), _FLOAT)], lambda x: x.argmax(-1), _REDUCTION
    ),
    "attention of one batch": Case(
        _attention,
        [((2, 3, "s0", 16), _FLOAT)] * 3,
        _attention_reference,
        {"matmul", "reduction", "elementwise"},
    ),
    "products": Case(
        _products,
        [((1, "s0", 64), _FLOAT)],
        lambda x, *weights: tuple(x @ weight.T for weight in weights),
        _MATMUL,
        _WEIGHTS,
    ),
    "gated": Case(_gated, [(_BATCH, _FLOAT)], _gated_reference, {"joined matmul"}, _WEIGHTS[:2]),
    "a batch of five rows": Case(
        _linear, [(("s0", 5, 64), _FLOAT)], lambda x, w: x @ w.T, _MATMUL, _WEIGHTS[:1]
    ),
    "eight sequences": Case(
        _rectified,
        [((8, "s0", 64), _FLOAT)],
        lambda x, w: np.maximum(x @ w.T, 0),
        _MATMUL,
        _WEIGHTS[:1],
    ),
    "one row of each": Case(
        _linear, [(("s0", 1, 64), _FLOAT)], lambda x, w: x @ w.T, _MATMUL, _WEIGHTS[:1]
    ),
    "bfloat16": Case(
        _narrow,
        [(("s0", 64), _FLOAT)],
        np.matmul,
        {"matmul", "elementwise"},
        [random(64, 96, seed=5) / 8],
        1e-2,
    ),
    "heads": Case(
        _heads,
        [(_BATCH, _FLOAT)],
        lambda x: x.reshape(*x.shape[:2], 4, 16).transpose(0, 2, 1, 3),
        _ELEMENTWISE,
    ),
    "heads together": Case(
        _together,
        [(("s0", 4, "s1", 16), _FLOAT)],
        lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1),
        _ELEMENTWISE,
    ),
    "transposed": Case(
        lambda _, x: op.permute_dims(x, [1, 0]),
        [(("s0", "s1"), _FLOAT)],
        np.transpose,
        _ELEMENTWISE,
    ),
    "concatenated along": Case(
        lambda _, x, y: op.concat([x, y], -1),
        [((2, "s0"), _FLOAT), ((2, 5), _FLOAT)],
        lambda x, y: np.concatenate([x, y], -1),
        _ELEMENTWISE,
    ),
    "concatenated rows": Case(
        lambda _, x, y: op.concat([x, y], 1),
        [((2, "s0", 24), _FLOAT), ((2, 3, 24), _FLOAT)],
        lambda x, y: np.concatenate([x, y], 1),
        _ELEMENTWISE,
    ),
    "sliced": Case(
        lambda _, x: op.strided_slice(x, [1], [8], [32]),
        [(("s0", 64), _FLOAT)],
        lambda x: x[:, 8:32],
        _ELEMENTWISE,
    ),
    "embedded": Case(
        lambda _, i, table: op.take(table, i, axis=0),
        [((2, "s0"), "int64")],
        lambda i, table: table[i],
        _ELEMENTWISE,
        [random(50, 24)],
    ),
    "causal": Case(
        _causal,
        [(("s0",), _FLOAT)],
        lambda x: np.tri(len(x), dtype=bool),
        _ELEMENTWISE,
    ),
    "masked": Case(
        _where,
        [((1, 1, "s0"), "bool"), ((2, "s0", "s0"), _FLOAT)],
        lambda mask, x: np.where(mask, x, np.float32(-1e9)),
        _ELEMENTWISE,
    ),
    "variance": Case(_variance, [(_BATCH, _FLOAT)], lambda x: x.var(-1), _REDUCTION),
    "variance along": Case(_variance, [((3, "s0"), _FLOAT)], lambda x: x.var(-1), _REDUCTION),
    "similarity": Case(
        lambda builder, x, y: op.sum(builder.emit(op.multiply(x, y)), -1),
        [(_BATCH, _FLOAT)] * 2,
        lambda x, y: (x * y).sum(-1),
        _REDUCTION,
    ),
    "pooled": Case(
        _pooled,
        [(_BATCH, _FLOAT), (("s0", "s1"), _FLOAT)],
        _pooled_reference,
        {"elementwise", "reduction", "column reduction"},
    ),
    "growing cache": Case(
        _with_cache,
        [_ONE, _PAST, _ONE, _PAST, _ONE],
        _with_cache_reference,
        {"dot products", "streamed product", "reduction", "elementwise"},
    ),
    "the last of each": Case(
        _last_linear,
        [(_BATCH, _FLOAT)],
        lambda x, w: x[:, -1] @ w.T,
        {"matmul", "elementwise"},
        _WEIGHTS[:1],
    ),
    "all but the first": Case(
        _first_left_out,
        [(("s0", 64), _FLOAT)],
        lambda x, w: x[1:] @ w.T,
        {"matmul", "elementwise"},
        _WEIGHTS[:1],
    ),
    "every other": Case(
        lambda _, x: op.strided_slice(x, [1], [0], [64], [2]),
        [(("s0", 64), _FLOAT)],
        lambda x: x[:, ::2],
        _ELEMENTWISE,
    ),
    "windows of several rows": Case(
        _with_bias,
        [(("s0", 2, 2, 64), _FLOAT)],
        lambda x, w, bias: x @ w.T + bias,
        _MATMUL,
        [_WEIGHTS[0], random(96, seed=7)],
    ),
    "a sum over one more": Case(
        _over_one_more,
        [(("s0", 24), _FLOAT), ((1, 24), _FLOAT)],
        _over_one_more_reference,
        {"matmul", "elementwise"},
    ),
    "broadcast": Case(
        lambda _, x, y: op.add(x, y),
        [(("s0", "s1", 24), _FLOAT), (("s0", 1, 24), _FLOAT)],
        np.add,
        _ELEMENTWISE,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_program_serves_every_size(case):
    program = build(case.describe, case.inputs, case.weights)
    assert program.rules == case.rules, program.report
    for rows in EDGES:
        arrays = [_numbers(shape, dtype, rows, i) for i, (shape, dtype) in enumerate(case.inputs)]
        check(program, case.reference, arrays, case.weights, tolerance=case.tolerance)


def _numbers(shape: Sequence[int | str], dtype: str, rows: int, seed: int) -> Array:
    extents = [{"s0": rows, "s1": 5}.get(size, size) for size in shape]
    if dtype == _FLOAT:
        return random(*extents, seed=seed)
    most = 2 if dtype == "bool" else 50
    return np.random.default_rng(seed).integers(0, most, extents).astype(dtype)


@pytest.mark.parametrize("rows", [2, 9, 17])
def test_a_nan_stays_in_its_row(rows):
    program = build(_linear, [(("s0", 64), _FLOAT)], _WEIGHTS[:1])
    x = random(rows, 64)
    x[-1] = np.nan
    check(program, lambda x, w: x @ w.T, [x], _WEIGHTS[:1])


def test_long_mean_divides_by_the_current_length():
    program = build(lambda _, x: op.mean(x, 1), [((2, "s0", 24), _FLOAT)], hint=300)
    for rows in (2, 127, 129, 301):
        check(program, lambda x: x.mean(1), [random(2, rows, 24)])


def test_programs_of_all_classes_pack_their_weights_alike():
    shape = [((1, "s0", 64), _FLOAT)]
    packed = {build(_products, shape, _WEIGHTS, hint=hint).packed for hint in (8, 48, 400)}
    assert len(packed) == 1
