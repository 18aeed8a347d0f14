"""Pooling against PyTorch, borders and NaN included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from tvm import relax

from tests.compiler import programs
from tests.compiler.kernels.kernels import TARGETS, build, check, random, widest_vector
from tests.pairs import pairs

op = relax.op


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "window", "stride", "padding", "dilation", "ceil", "bordered"),
    [
        ((1, 20, 20, 32), (3, 3), (2, 2), (1, 1), 1, False, False),
        ((2, 13, 11, 5), (3, 2), (2, 2), (1, 1), 1, True, True),  # channels fill no vector
        ((2, 13, 10, 32), (3, 2), (2, 3), (1, 1), 1, True, False),
        ((1, 9, 9, 40), (2, 2), (2, 2), (0, 0), 1, False, None),
        ((1, 5, 17, 16), (5, 4), (1, 2), (2, 2), 1, False, False),
        (
            (1, 11, 9, 32),
            (3, 3),
            (1, 1),
            (1, 1),
            2,
            False,
            True,
        ),  # the nearest pixel may be outside of the window
        ((1, 9, 9, 16), (6, 6), (1, 1), (3, 3), 1, False, True),  # a loop, not unrolled
    ],
)
def test_maximum(target, shape, window, stride, padding, dilation, ceil, bordered):
    x = random(*shape)
    x[..., 3] -= 9  # less than any zero past the border
    x[0, 0, 0, 0] = x[-1, -1, -1, 1] = np.nan
    built = build(
        lambda builder, x: op.nn.max_pool2d(
            x, window, stride, padding, (dilation, dilation), ceil_mode=ceil, layout="NHWC"
        ),
        [x],
        target=target,
    )
    expected = (
        torch.nn.functional.max_pool2d(
            torch.from_numpy(x).permute(0, 3, 1, 2), window, stride, padding, dilation, ceil
        )
        .permute(0, 2, 3, 1)
        .numpy()
    )
    np.testing.assert_array_equal(built.run([x]), expected)
    assert built.rules == {"pooling"}
    assert widest_vector(built.kernel()) > 1
    if bordered is not None:
        assert ("pool_pad" in built.kernel().script()) == bordered


@pytest.mark.parametrize(
    ("count", "ceil", "padding", "channels"),
    [
        *pairs([False, True], [False, True], [0, 1], [20, 32]),
        (False, True, 1, 20),  # the last window has pixels, padding, and positions beyond it
    ],
)
def test_average(count, ceil, padding, channels):
    check(
        lambda builder, x: op.nn.avg_pool2d(
            *(x, (3, 3), (2, 2), (padding, padding)),
            ceil_mode=ceil,
            count_include_pad=count,
            layout="NHWC",
        ),
        lambda x: (
            torch.nn.functional.avg_pool2d(
                torch.from_numpy(x).permute(0, 3, 1, 2), 3, 2, padding, ceil, count
            )
            .permute(0, 2, 3, 1)
            .numpy()
        ),
        [random(2, 14, 13, channels)],
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


@pytest.mark.parametrize("pool", [nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(2)], ids=str)
def test_pools_of_sequences_have_the_layout_of_convolutions(pool: nn.Module):
    module = nn.Sequential(nn.Conv1d(8, 32, 5), nn.ReLU(), pool, nn.Conv1d(32, 16, 3))
    artifact = programs.check(module, torch.randn(2, 8, 40))
    assert "pooling" in artifact.report["kernels"].values()  # this rule is for channels last only
