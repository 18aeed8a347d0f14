"""Last tiles with few rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, s_tir, tirx

from tests.compiler.kernels.kernels import random
from tests.compiler.symbolic import Symbolic, build, check
from tvmify.compiler import pipeline
from tvmify.compiler.kernels.common.short_tiles import short_heights

#: One sum in registers, and several blocks of a reduction.
_DEPTHS = (40, 2100)
_COLUMNS = 72


def _weights(depth):
    return [random(depth, _COLUMNS, seed=1), random(_COLUMNS, seed=2)]


def _layer(builder, x, weight, bias):
    return relax.op.add(builder.emit(relax.op.matmul(x, weight)), bias)


def _gate(builder, x, weight, other):
    gate = builder.emit(relax.op.nn.silu(builder.emit(relax.op.matmul(x, weight))))
    return relax.op.multiply(gate, builder.emit(relax.op.matmul(x, other)))


def _silu_times(x, weight, other):
    gate = x @ weight
    return gate / (1 + np.exp(-gate)) * (x @ other)


@cache
def _built(depth: int) -> Symbolic:
    return build(_layer, [(("s0", depth), "float32")], _weights(depth))


@cache
def _gated() -> tuple[Symbolic, list]:
    weights = [random(64, 160, seed=seed) / 8 for seed in (1, 2)]
    return build(_gate, [(("s0", 64), "float32")], weights), weights


@pytest.mark.parametrize("rows", [*range(2, 20), 50])
@pytest.mark.parametrize("depth", _DEPTHS)
def test_any_part_of_a_tile_is_computed(depth, rows):
    reference = lambda x, weight, bias: x @ weight + bias  # noqa: E731
    check(_built(depth), reference, [random(rows, depth, seed=3)], _weights(depth))


@pytest.mark.parametrize("rows", [*range(2, 12), 31])
def test_any_part_of_a_joined_tile_is_computed(rows):
    program, weights = _gated()
    assert "joined matmul" in program.rules
    check(program, _silu_times, [random(rows, 64, seed=3)], weights)


def _versions(monkeypatch, hint) -> int:
    """Return the number of blocks of the scheduled product that sum."""
    scheduled = []
    schedule = pipeline.schedule
    monkeypatch.setattr(
        pipeline, "schedule", lambda *args: scheduled.append(schedule(*args)) or scheduled[-1]
    )
    build(_layer, [(("s0", _DEPTHS[0]), "float32")], _weights(_DEPTHS[0]), hint=hint)
    names = []
    for _, function in scheduled[-1][0].functions_items():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(
                function.body, [(s_tir.SBlock, lambda block: names.append(block.name_hint))]
            )
    return sum(name == "matmul_tile_update" for name in names)


def test_only_products_of_few_rows_have_versions(monkeypatch):
    assert _versions(monkeypatch, 32) > 1
    assert _versions(monkeypatch, 500) == 1


def test_versions_have_enough_sums_to_hide_latency():
    assert short_heights(6, vectors=3) == [2, 4]
    assert short_heights(6, vectors=2) == [4]
    assert short_heights(1, vectors=4) == []
