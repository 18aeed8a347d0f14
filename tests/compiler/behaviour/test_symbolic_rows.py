"""Programs for any number of rows: one build, run with sizes around the edges of tiles."""

from __future__ import annotations

from functools import cache
from math import erf

import numpy as np
import pytest
from tvm import relax, tirx

from tests.compiler.kernels.kernels import random
from tests.compiler.symbolic import EDGES, Symbolic, build, check

op = relax.op
_WIDE, _INNER = 96, 160
_WEIGHTS = [
    random(_INNER, _WIDE, seed=1) / 8,
    random(_INNER, seed=2),
    random(_WIDE, _INNER, seed=3) / 8,
    random(_WIDE, seed=4),
    random(_WIDE, seed=5),
    random(_WIDE, seed=6),
]


def _linear(builder, x, weight, bias):
    product = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight, [1, 0]))))
    return builder.emit(op.add(product, bias))


def _block(builder, x, up, up_bias, down, down_bias, scale, shift):
    inner = builder.emit(op.nn.gelu(_linear(builder, x, up, up_bias)))
    added = builder.emit(op.add(_linear(builder, inner, down, down_bias), x))
    return op.nn.layer_norm(added, scale, shift, axes=[-1], epsilon=1e-5)


def _reference(x, up, up_bias, down, down_bias, scale, shift):
    inner = x @ up.T + up_bias
    inner *= 0.5 * (1 + np.vectorize(erf)(inner / np.sqrt(2)))
    added = inner @ down.T + down_bias + x
    centred = added - added.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


@cache
def _built(shape: tuple[int | str, ...]) -> Symbolic:
    return build(_block, [(shape, "float32")], _WEIGHTS)


@pytest.mark.parametrize("rows", EDGES)
@pytest.mark.parametrize("lead", [(), (1,)])
def test_transformer_block_at_tile_edges(lead, rows):
    program = _built((*lead, "s0", _WIDE))
    assert program.rules == {"matmul", "reduction"}, program.report
    check(program, _reference, [random(*lead, rows, _WIDE, seed=9)], _WEIGHTS)


@pytest.mark.parametrize(("batch", "length"), [(2, 2), (2, 7), (3, 17), (5, 31), (7, 7)])
def test_rows_of_two_symbols_are_one_number(batch, length):
    program = _built(("s0", "s1", _WIDE))
    assert program.rules == {"matmul", "reduction"}, program.report
    kernels = [f for v, f in program.ir_mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    own = [f for f in kernels if f.params and hasattr(f.params[0].ty, "shape")]
    assert all(len(f.params[0].ty.shape) < 3 for f in own)
    check(program, _reference, [random(batch, length, _WIDE, seed=9)], _WEIGHTS)
