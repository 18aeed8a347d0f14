"""The kernels that `ShuffleLoads` has to search."""

from __future__ import annotations

import pytest
from tvm import relax

from tests.compiler.kernels.kernels import AVX2, Array, Describe, build, random
from tvmify.compiler.kernels.elementwise.shuffles import SHUFFLES


def _is_marked(describe: Describe, inputs: Array, *weights: Array) -> bool:
    built = build(describe, [inputs], weights, AVX2)
    return any(SHUFFLES in function.attrs for function in built.ir_mod.functions.values())


@pytest.mark.parametrize(
    "describe",
    [
        lambda builder, x: relax.op.flip(x, 1),
        lambda builder, x: relax.op.strided_slice(x, [1], [0], [64], [2]),
        lambda builder, x: relax.op.repeat(x, 2, 1),
    ],
    ids=["from the end", "every second", "twice each"],
)
def test_lanes_out_of_order_are_marked(describe: Describe):
    assert _is_marked(describe, random(64, 64))


def test_panels_of_whole_vectors_are_in_order():
    # The column of a tile of 16 or 24 is ``column % 24``, although its lanes are adjacent.
    # Searching every such kernel took a third of the time to lower ResNet-18.
    def describe(builder, left, right):
        return relax.op.nn.relu(relax.op.matmul(left, right))

    assert not _is_marked(describe, random(64, 48), random(48, 96, seed=1))
