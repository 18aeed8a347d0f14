"""Maxima of volumes, with tails of rows, specials at the borders, and what is fused in front."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from tvm import relax

from tests.compiler.kernels.kernels import TARGETS, Array, build, check, random, widest_vector
from tvmify.compiler.kernels.conv.volumes import NAME

op = relax.op
WINDOWS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((2, 2, 2), (2, 2, 2), (0, 0, 0)),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ((1, 3, 2), (1, 1, 2), (0, 1, 0)),
    ((4, 1, 5), (3, 2, 1), (2, 0, 2)),
]


def pooled(x: Array, *window: Any) -> Array:
    return F.max_pool3d(torch.from_numpy(x), *window).numpy()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [5, 16, 37])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_maxima_of_volumes(target, width, window):
    size, strides, before = window
    x = random(2, 3, 6, 7, width)
    x[0, 0, 0, 0, 0], x[1, 1, -1, -1, -1], x[1, 2] = np.nan, np.inf, -np.inf
    built = build(
        lambda builder, x: op.nn.max_pool3d(x, size, strides, [*before, *before]),
        [x],
        target=target,
    )
    assert built.rules == {NAME}
    np.testing.assert_array_equal(built.run([x]), pooled(x, *window))
    assert widest_vector(built.kernel()) >= min(width, 8)


def test_what_is_in_front_of_windows_apart_is_fused():
    check(
        lambda builder, x: op.nn.max_pool3d(op.add(x, x), (2, 2, 2), (2, 2, 2)),
        lambda x: pooled(x + x, 2),
        [random(1, 2, 6, 7, 37)],
        rule=NAME,
    )


def test_windows_with_gaps_and_integers_are_left_to_other_rules():
    x = random(1, 2, 6, 7, 9)
    gaps = build(lambda builder, x: op.nn.max_pool3d(x, (2, 2, 2), dilation=(2, 1, 1)), [x])
    whole = build(lambda builder, x: op.nn.max_pool3d(x, (2, 2, 2)), [x.astype("int32")])
    assert NAME not in gaps.rules | whole.rules
