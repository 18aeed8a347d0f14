"""Attention whose batch and numbers of queries and keys differ from call to call."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from tvm import relax
from tvm.ir import Expr

from tests.compiler.kernels.kernels import Array, random
from tests.compiler.symbolic import Symbolic, build
from tvmify.compiler.kernels.attention.lower_attention import describe

op = relax.op
HEADS, SIZE, SCALE = 4, 16, 0.25
#: Numbers of queries and keys around the edges of vectors, tiles and blocks.
LENGTHS = [(2, 31), (7, 2), (8, 17), (9, 8), (15, 512), (16, 16), (17, 7), (31, 15), (300, 299)]


def described(q: Expr, k: Expr, v: Expr, mask: Expr | None = None, **options: Any) -> Expr:
    kept: dict[str, Any] = {"causal": False, "empty": 0.0, "fill": None}
    return describe(q, k, v, mask, scale=SCALE, **(kept | options))


def heads(*shape: int | str) -> tuple[tuple[int | str, ...], str]:
    return shape, "float32"


def expected(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, empty: float = 0.0
) -> Array:
    """Attention in float64; a bool mask selects keys, other masks are added."""
    query, *others = (torch.from_numpy(a).double() for a in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    key, value = (a.repeat_interleave(shared, 1) for a in others)
    scores = query @ key.mT * SCALE
    if mask is not None:
        given = torch.from_numpy(mask)
        scores = scores.masked_fill(~given, -math.inf) if mask.dtype == bool else scores + given
    result = scores.softmax(-1) @ value
    seen = (scores > -math.inf).any(-1, keepdim=True) | scores.isnan().any(-1, keepdim=True)
    return torch.where(seen, result, empty).numpy()


def check(program: Symbolic, arrays: list[Array], want: Array) -> None:
    (got,) = program.run(arrays)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    largest = np.abs(want[finite]).max(initial=0.0)
    assert np.abs(got - want)[finite].max(initial=0.0) <= 3e-6 * largest


@pytest.fixture(scope="module")
def plain() -> Symbolic:
    query, key = (heads("b", HEADS, n, SIZE) for n in ("q", "k"))
    return build(lambda _, q, k, v: described(q, k, v), [query, key, key], hint=20)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_batch_queries_and_keys(plain: Symbolic, queries: int, keys: int):
    assert "attention" in plain.rules
    lengths = (queries, keys, keys)
    arrays = [random(3, HEADS, n, SIZE, seed=i) for i, n in enumerate(lengths)]
    check(plain, arrays, expected(*arrays))


def test_padding_of_tiles_does_not_leak_into_results(plain: Symbolic):
    q, k, v = (random(2, HEADS, n, SIZE, seed=i) for i, n in enumerate((9, 17, 17)))
    # The last of each stands for missing ones.
    q[0, 0, -1], k[0, 1, -1, 3], v[1, 2, -1, 5] = np.nan, np.nan, np.inf
    (got,) = plain.run([q, k, v])
    want = expected(q, k, v)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isfinite(got[0, 0, :-1]).all() and np.isfinite(got[0, 2:]).all()
    assert np.isinf(got[1, 2, :, 5]).all()


def test_causal_of_one_tensor_with_shared_heads():
    shared = 2
    wide = (HEADS + 2 * HEADS // shared) * SIZE

    def attention(builder: relax.BlockBuilder, x: Expr) -> Expr:
        batch, length, _ = x.ty.shape.values
        ends = [HEADS, HEADS + HEADS // shared]
        split = builder.emit(op.split(x, [end * SIZE for end in ends], axis=-1))
        parts = []
        for i, count in enumerate((HEADS, HEADS // shared, HEADS // shared)):
            part = builder.emit(relax.TupleGetItem(split, i))
            part = builder.emit(op.reshape(part, [batch, length, count, SIZE]))
            parts.append(builder.emit(op.permute_dims(part, [0, 2, 1, 3])))
        out = builder.emit(described(*parts, causal=True))
        out = builder.emit(op.permute_dims(out, [0, 2, 1, 3]))
        return op.reshape(out, [batch, length, HEADS * SIZE])

    program = build(attention, [heads("b", "s", wide)], hint=20)
    # Operands are read in place, and the result is stored directly.
    called = re.findall(r"cls\.tvmify_(\w+)\(", program.ir_mod.script())
    assert called == ["attention"]
    for length, _ in LENGTHS:
        x = random(2, length, wide, seed=length)
        every = x.reshape(2, length, -1, SIZE).transpose(0, 2, 1, 3)
        shown = np.tril(np.ones((length, length), bool))
        want = expected(*np.split(every, [HEADS, HEADS + HEADS // shared], axis=1), shown)
        check(program, [x], want.transpose(0, 2, 1, 3).reshape(2, length, -1))


@pytest.mark.parametrize(
    ("shape", "dtype", "empty"),
    [(("b", 1, 1, "k"), "bool", 0.0), ((1, HEADS, "q", "k"), "float32", math.nan)],
    ids=["keys", "all"],
)
def test_masks(shape: tuple[int | str, ...], dtype: str, empty: float):
    query, key = (heads("b", HEADS, n, SIZE) for n in ("q", "k"))

    def attention(_: relax.BlockBuilder, *operands: Expr) -> Expr:
        return described(*operands, empty=empty)

    program = build(attention, [query, key, key, (shape, dtype)], hint=20)
    for queries, keys in LENGTHS:
        arrays = [random(2, HEADS, n, SIZE, seed=i) for i, n in enumerate((queries, keys, keys))]
        sizes = {"b": 2, "q": queries, "k": keys}
        mask = random(*(sizes.get(str(n), n) for n in shape), seed=9)
        mask[..., -1, : keys // 2 + 1] = -math.inf
        mask[:1, ..., -1, :] = -math.inf  # all keys of a query, or of a batch, are hidden
        given = mask > -1 if dtype == "bool" else mask
        check(program, [*arrays, given], expected(*arrays, given, empty=empty))


def test_one_query_and_growing_keys():
    def attention(builder: relax.BlockBuilder, *given: Expr) -> Expr:
        q, k, v, key, value, mask = given
        keys = builder.emit(op.concat([k, key], axis=2))
        values = builder.emit(op.concat([v, value], axis=2))
        return described(q, keys, values, builder.emit(op.logical_not(mask)))

    one, before = heads("b", HEADS, 1, SIZE), heads("b", HEADS, "s", SIZE)
    shapes = [one, before, before, one, one]
    program = build(attention, [*shapes, (("b", 1, 1, "t"), "bool")], hint=20)
    assert "attention" in program.rules
    for past in (2, 6, 7, 8, 14, 15, 16, 30, 300):
        lengths = (1, past, past, 1, 1)
        arrays = [random(2, HEADS, n, SIZE, seed=i) for i, n in enumerate(lengths)]
        hidden = random(2, 1, 1, past + 1, seed=9) > 1
        q, k, v, key, value = arrays
        whole = (np.concatenate(pair, 2) for pair in ((k, key), (v, value)))
        check(program, [*arrays, hidden], expected(q, *whole, ~hidden))


def test_few_queries_sharing_heads():
    query, key = heads("b", HEADS, "q", SIZE), heads("b", 1, "k", SIZE)
    program = build(lambda _, q, k, v: described(q, k, v), [query, key, key], hint=3)
    assert "attention" in program.rules
    for queries, keys in LENGTHS:
        arrays = [
            random(2, count, n, SIZE, seed=i)
            for i, (count, n) in enumerate(((HEADS, queries), (1, keys), (1, keys)))
        ]
        check(program, arrays, expected(*arrays))


@pytest.mark.parametrize("repeated", [("key", "value"), ("key",)])
def test_repeated_heads_are_not_copied(repeated: tuple[str, ...]):
    """As in `repeat_kv` of transformers, also if only the keys are repeated."""

    def repeat(builder: Any, x: Expr) -> Expr:
        batch, few, length, size = x.ty.shape.values
        narrow = builder.emit(op.reshape(x, [batch, few, 1, length, size]))
        wide = builder.emit(op.broadcast_to(narrow, [batch, few, 2, length, size]))
        return builder.emit(op.reshape(wide, [batch, few * 2, length, size]))

    def program(builder: Any, q: Expr, k: Expr, v: Expr) -> Expr:
        k, v = (
            repeat(builder, x) if role in repeated else x for role, x in (("key", k), ("value", v))
        )
        return described(q, k, v)

    both = len(repeated) == 2
    values = HEADS // 2 if both else HEADS
    shapes = [(2, HEADS, 1), (2, HEADS // 2, "s0"), (2, values, "s0")]
    built = build(program, [heads(*shape, SIZE) for shape in shapes], hint=32)
    assert any("broadcast_to" in name for name in built.report) == (not both)
    for length in (5, 33):
        counts = zip((HEADS, HEADS // 2, values), (1, length, length), strict=True)
        q, k, v = (random(2, count, n, SIZE, seed=i) for i, (count, n) in enumerate(counts))
        check(built, [q, k, v], expected(q, k if both else k.repeat(2, 1), v))
