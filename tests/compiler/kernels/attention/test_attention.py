"""The attention kernels: every kind of mask, odd sizes, blocks of keys, operands in one tensor."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from tests.compiler.kernels.kernels import (
    AVX2,
    NATIVE,
    NEON,
    TARGETS,
    Array,
    assembly,
    executable,
    has_parallel_loop,
    random,
)
from tests.pairs import pairs
from tvmify.compiler.kernels.attention import template as rule
from tvmify.compiler.kernels.attention.plan import Plan, Rows, Tiles, candidates
from tvmify.compiler.kernels.attention.template import Attention, Mask, Operand
from tvmify.compiler.kernels.common.choice import Choices
from tvmify.compiler.microarchitecture import Microarchitecture


def describe(
    queries: int, keys: int, size: int, *, heads: int = 4, shared: int = 1, **options: Any
) -> Attention:
    """Two batches, positions before heads."""
    value_size = options.pop("value_size", size)
    kept = heads // shared
    return Attention(
        Operand((2, queries, heads, size)),
        Operand((2, keys, kept, size)),
        Operand((2, keys, kept, value_size)),
        options.pop("mask", None),
        2,
        heads,
        shared,
        size,
        value_size,
        options.pop("scale", 0.3),
        **options,
    )


def by_rule(about: Attention, machine: Microarchitecture) -> Plan:
    return candidates(about, machine)[0]


def run(
    about: Attention,
    arrays: list[Array],
    target: tvm.target.Target = NATIVE,
    plan: Plan | None = None,
) -> Array:
    """Build the kernel and call it, with the mask in the layout of the kernel."""
    machine = Microarchitecture.of(target)
    plan = plan or by_rule(about, machine)
    if about.mask is not None:
        wanted = rule.prepared(about.mask, about, plan)
        if wanted != about.mask:
            padding = wanted.shape[3] - about.mask.shape[2]
            transposed = arrays[3].swapaxes(2, 3)
            arrays = [*arrays[:3], np.pad(transposed, [(0, 0)] * 3 + [(0, padding)])]
        about = replace(about, mask=wanted)
    built = executable(rule.kernel(about, plan, machine), target)
    out = tvm.runtime.tensor(np.full(about.out, 7, about.dtype))
    built(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays), out)
    return out.numpy()


def kernel(about: Attention, target: tvm.target.Target = NATIVE) -> tvm.tirx.PrimFunc:
    machine = Microarchitecture.of(target)
    return rule.kernel(about, by_rule(about, machine), machine)


def expected(about: Attention, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, about.shared, 2) for a in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * about.scale
    if mask is not None:
        with np.errstate(divide="ignore"):
            scores = scores + (np.log(mask.astype(float)) if mask.dtype == bool else mask)
    if about.causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    best = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(best), 0, best))
    total = weights.sum(-1, keepdims=True)
    weights = np.where(total == 0, about.empty, weights / np.where(total == 0, 1, total))
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


def operands(about: Attention) -> list[Array]:
    shapes = (about.query.shape, about.key.shape, about.value.shape)
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)]


def check(
    about: Attention,
    arrays: list[Array],
    target: tvm.target.Target = NATIVE,
    plan: Plan | None = None,
) -> None:
    with np.errstate(invalid="ignore"):
        want = expected(about, *arrays)
    got = run(about, arrays, target, plan)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    assert np.abs(got - want)[finite].max() <= 3e-6 * np.abs(want[finite]).max()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "about",
    [
        describe(37, 53, 20),
        describe(16, 16, 32, causal=True),
        describe(5, 7, 3, value_size=5, causal=True),
        describe(45, 1100, 24, value_size=8, causal=False, heads=1),
        describe(700, 650, 8, heads=1, causal=True),
        describe(100, 1100, 24, value_size=16, heads=1),
        # With AVX2, the last tile of 6 rows extends beyond the 16 queries of a block.
        describe(64, 1500, 64, heads=1),
        describe(1000, 1000, 24, heads=1, causal=True),
        describe(9, 33, 16, shared=4),
        describe(1, 65, 64, shared=2),
        describe(2, 19, 20, value_size=37, shared=2, causal=True),
        describe(1, 3, 7),
    ],
    ids=lambda about: f"{about.query.length}-{about.key.length}-{about.size}",
)
def test_sizes(about: Attention, target: tvm.target.Target):
    check(about, operands(about), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "about",
    [
        describe(2, 19, 20),
        describe(7, 90, 20, value_size=37, shared=2, causal=True),
        describe(150, 1400, 24, value_size=8, heads=1),
        describe(300, 300, 64, heads=1, mask=Mask((2, 1, 300, 300), "float32")),
    ],
    ids=lambda about: f"{about.query.length}-{about.key.length}-{about.size}",
)
def test_alternatives(about: Attention, target: tvm.target.Target):
    arrays = operands(about)
    if about.mask is not None:
        arrays.append(random(*about.mask.shape, seed=5))
    plans = candidates(about, Microarchitecture.of(target))
    assert len({str(plan) for plan in plans}) == len(plans)
    for plan in plans[: Choices().most]:
        check(about, arrays, target, plan)


def test_candidate_set():
    machine = Microarchitecture.of(AVX2)
    assert candidates(describe(1, 65, 64), machine) == [Rows()]
    few = candidates(describe(2, 65, 64), machine)
    assert few[0] == Rows() and isinstance(few[1], Tiles)
    vector = candidates(describe(8, 65, 64), machine)
    assert isinstance(vector[0], Tiles) and vector[1] == Rows()
    own, *others = candidates(describe(480, 4000, 64), machine)
    assert isinstance(own, Tiles) and Rows() not in others
    for feature in ("width", "groups", "block"):
        assert any(getattr(plan, feature) != getattr(own, feature) for plan in others)


@pytest.mark.parametrize(
    ("queries", "shape", "dtype"),
    pairs([19, 2], [(2, 1, 0, 30), (1, 4, 1, 30), (1, 1, 0, 1)], ["bool", "float32"]),
)
def test_masks(queries: int, shape: tuple[int, ...], dtype: str):
    shape = tuple(extent or queries for extent in shape)
    mask = random(*shape, seed=5)
    if dtype == "bool":
        mask = mask > -0.5
    about = describe(queries, 30, 16, mask=Mask(shape, dtype))
    check(about, [*operands(about), mask])


@pytest.mark.parametrize(
    ("queries", "empty", "keys"),
    pairs([19, 2], [0.0, np.nan], [700, 2100]),  # 2,100 keys do not stay in L2
)
def test_fully_masked_queries(queries: int, empty: float, keys: int):
    mask = np.zeros((1, 1, queries, keys), np.float32)
    mask[..., 1, :] = -np.inf
    mask[..., 0, :600] = -np.inf  # whole blocks of keys
    about = describe(queries, keys, 16, mask=Mask(mask.shape, "float32"), empty=empty)
    check(about, [*operands(about), mask])


@pytest.mark.parametrize("target", TARGETS)
def test_masks_of_many_blocks_of_keys(target: tvm.target.Target):
    mask = random(2, 1, 70, 1100, seed=5)
    about = describe(70, 1100, 24, mask=Mask(mask.shape, "float32"))
    check(about, [*operands(about), mask], target)


@pytest.mark.parametrize("queries", [19, 1])
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_specials_spoil_their_own_rows_only(queries: int, special: float):
    about = describe(queries, 600, 16)
    q, k, v = operands(about)
    q[0, 0, 1, 3] = special
    v[1, 7, 2, 5] = special
    k = np.abs(k)
    got = run(about, [q, k, v])
    assert np.isnan(got[0, 0, 1]).all()
    assert np.isfinite(got[0, 0, 0]).all() and np.isfinite(got[0, 1:]).all()
    assert not np.isfinite(got[1, :, 2, 5]).any()
    assert np.isfinite(np.delete(got[1, :, 2], 5, axis=-1)).all()


def test_operands_in_one_tensor_and_heads_first():
    about = describe(12, 12, 16)
    q, k, v = operands(about)
    merged = np.concatenate([q, k], axis=2)
    shape = merged.shape
    inside = replace(
        about,
        query=Operand(shape),
        key=Operand(shape, first=4),
        value=Operand((2, 4, 12, 16), heads_first=True),
    )
    got = run(inside, [merged, merged, v.swapaxes(1, 2)])
    np.testing.assert_array_equal(got, run(about, [q, k, v]))


def test_double_precision():
    about = describe(21, 30, 12, dtype="float64")
    arrays = [a.astype(np.float64) for a in operands(about)]
    np.testing.assert_allclose(run(about, arrays), expected(about, *arrays), rtol=1e-12, atol=1e-13)


def test_no_scores_of_all_queries_against_all_keys():
    function = kernel(describe(4000, 4000, 64))
    shapes = re.findall(r"alloc_buffer\(\((.*?)\)", function.script())
    sizes = [math.prod(int(re.sub(r"\D", "", n)) for n in s.split(",") if n) for s in shapes]
    assert sizes and max(sizes) <= 32 * 1024


@pytest.mark.parametrize(
    ("places", "keys", "queries"), [(480, 4000, 48), (480, 100, 16), (64, 4000, 32)]
)
def test_many_queries_share_loads_of_distant_keys(places: int, keys: int, queries: int):
    script = kernel(describe(places, keys, 64), AVX2).script()
    (tasks,) = re.findall(r"T\.parallel\((\d+)\)", script)
    assert int(tasks) == 2 * 4 * places // queries


def test_parallel_only_when_worth_it():
    assert has_parallel_loop(kernel(describe(256, 256, 64)))
    assert not has_parallel_loop(kernel(describe(4, 4, 8)))


@pytest.mark.parametrize("queries", [64, 1])
def test_neon_multiplies_vectors(queries: int):
    about = describe(queries, 64, 32)
    text = assembly(kernel(about, NEON), NEON)
    assert ".4s" in text and "fmla" in text
