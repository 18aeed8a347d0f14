"""The candidates for depthwise convolutions and pools."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from tvm import relax, tirx

from tests.compiler.kernels.kernels import TARGETS, Array, build, check, loops, random
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.conv.channelwise import Cut, cuts

op = relax.op


def test_cuts():
    own, *others = cuts(40, 112, 8)
    assert own == Cut(8, 8)
    assert {cut.pixels for cut in others if cut.rows == own.rows} == {7, 6, 4}
    assert {cut.rows for cut in others if cut.pixels == own.pixels} == {16, 4}


def test_no_bands_without_padding():
    assert {cut.rows for cut in cuts(40, 112, 8, bordered=False)} == {0}


def test_small_images_have_fewer_cuts():
    assert cuts(1, 1, 19) == [Cut(1, 1)]
    assert all(cut.rows <= 7 and cut.pixels <= 7 for cut in cuts(7, 7, 19))


def _depthwise(builder: relax.BlockBuilder, x: relax.Var, w: relax.Var) -> relax.Expr:
    options = {"groups": 20, "data_layout": "NHWC", "kernel_layout": "OHWI"}
    return op.nn.conv2d(x, w, (2, 2), (1, 1), **options)


def test_packing_part_of_a_vector_repeats_no_loop():
    built = build(_depthwise, [random(1, 9, 9, 20)], [random(20, 3, 3, 1)])
    (name,) = (name for name in built.report if "pack" in name)
    assert tirx.ForKind.UNROLLED not in {loop.kind for loop in loops(built.ir_mod[name])}


def _maxima(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return op.nn.max_pool2d(x, (3, 3), (2, 2), padding=(1, 1), layout="NHWC")


def _means(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return op.nn.avg_pool2d(x, (3, 3), (2, 2), padding=(1, 1), layout="NHWC")


def _in_torch(of: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """Return a function of arrays with channels last."""

    def reference(x: Array, *weights: Array) -> Array:
        kernels = (torch.from_numpy(w).permute(0, 3, 1, 2) for w in weights)
        return of(torch.from_numpy(x).permute(0, 3, 1, 2), *kernels).permute(0, 2, 3, 1).numpy()

    return reference


CASES = {
    "depthwise": (_depthwise, _in_torch(lambda x, w: F.conv2d(x, w, None, 2, 1, groups=20))),
    "max_pool2d": (_maxima, _in_torch(lambda x: F.max_pool2d(x, 3, 2, 1))),
    "avg_pool2d": (
        _means,
        _in_torch(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", CASES)
def test_alternatives(kind: str, target):
    describe, reference = CASES[kind]
    weights = [random(20, 3, 3, 1, seed=1)] if kind == "depthwise" else []
    inputs = [random(2, 41, 57, 20)]
    rule = "depthwise" if weights else "pooling"
    with choosing(Choices()) as collected:
        by_rule = build(describe, inputs, weights, target)
    ((workload, names),) = collected.candidates.items()
    assert workload.startswith(kind)
    assert len(names) >= 4
    scripts = []
    for name in names:
        with choosing(Choices(measured={workload: name})):
            built = check(describe, reference, inputs, weights, rule=rule, target=target)
        scripts.append(built.kernel().script())
        np.testing.assert_array_equal(built.run(inputs, weights), by_rule.run(inputs, weights))
    assert scripts[0] == by_rule.kernel().script()
    assert len(set(scripts)) == len(scripts)
