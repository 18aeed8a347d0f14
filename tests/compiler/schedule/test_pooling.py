"""Pooling against PyTorch, borders and NaN included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tvm import relax

from tests.compiler.schedule.kernels import TARGETS, build, check, random, widest_vector

op = relax.op


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "window", "stride", "padding", "ceil"),
    [
        ((1, 20, 20, 32), (3, 3), (2, 2), (1, 1), False),
        ((2, 13, 11, 5), (3, 2), (2, 2), (1, 1), True),
        ((1, 9, 9, 40), (2, 2), (2, 2), (0, 0), False),
    ],
)
def test_maximum(target, shape, window, stride, padding, ceil):
    built = check(
        lambda builder, x: op.nn.max_pool2d(
            x, window, stride, padding, ceil_mode=ceil, layout="NHWC"
        ),
        lambda x: (
            torch.nn.functional.max_pool2d(
                torch.from_numpy(x).permute(0, 3, 1, 2), window, stride, padding, ceil_mode=ceil
            )
            .permute(0, 2, 3, 1)
            .numpy()
        ),
        [random(*shape)],
        rule="pooling",
        target=target,
    )
    assert widest_vector(built.kernel()) > 1


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("count", [False, True])
def test_average(count, ceil):
    check(
        lambda builder, x: op.nn.avg_pool2d(
            x, (3, 3), (2, 2), (1, 1), ceil_mode=ceil, count_include_pad=count, layout="NHWC"
        ),
        lambda x: (
            torch.nn.functional.avg_pool2d(
                torch.from_numpy(x).permute(0, 3, 1, 2), 3, 2, 1, ceil, count
            )
            .permute(0, 2, 3, 1)
            .numpy()
        ),
        [random(2, 14, 13, 20)],
        rule="pooling",
    )


def test_maximum_keeps_nan_and_infinities():
    x = random(1, 8, 8, 17)
    x[0, 2, 3, 5] = np.nan
    x[0, 4:, 4:, 16] = -np.inf
    built = build(lambda builder, v: op.nn.max_pool2d(v, (2, 2), (2, 2), layout="NHWC"), [x])
    nchw = torch.from_numpy(x).permute(0, 3, 1, 2)
    expected = torch.nn.functional.max_pool2d(nchw, 2).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(built.run([x]), expected)


def test_global_average():
    check(
        lambda builder, x: op.nn.adaptive_avg_pool2d(x, (1, 1), layout="NHWC"),
        lambda x: x.mean((1, 2), keepdims=True),
        [random(1, 7, 7, 40)],
        rule="column reduction",
    )
