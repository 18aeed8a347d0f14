"""The use of NEON's vectors, checked in the assembly, since no test machine has them.

Such tests of matrix products, convolutions, attention and transposes are with their other tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tvm import relax, tirx

from tests.compiler.kernels.conv.test_expanded_depthwise import JOINED, Network
from tests.compiler.kernels.kernels import NEON, Describe, assembly, build, random
from tvmify.compiler.kernels.common.rewriting import names_of
from tvmify.compiler.kernels.recurrent import template as recurrent
from tvmify.compiler.kernels.recurrent.plan import Plan
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op

#: Instructions on four floats. A maximum that keeps NaN is a comparison and a selection.
MULTIPLY_ADD, ADD, MAXIMUM = (rf"\b{name}\tv\d+\.4s" for name in ("fmla", "fadd", "fcmg[et]"))
# Maxima that keep NaN compare bits, not numbers.
INTEGER_MAXIMUM = r"\bsmax\tv\d+\.4s"
#: Calls of the C library, which go lane by lane.
CALL = r"\bbl?\t(exp|tanh|erf|log|sin)f?\b"


@pytest.mark.parametrize(("kind", "gates"), [(recurrent.lstm, 4), (recurrent.gru, 3)])
def test_steps_of_recurrent_layers(kind: Callable[..., tirx.PrimFunc], gates: int):
    plan = Plan.of(4, 2, 24, gates, "float32", Microarchitecture.of(NEON))
    text = assembly(kind(plan, reverse=False), NEON)
    assert re.search(MULTIPLY_ADD, text)
    assert not re.search(CALL, text)


def test_expanded_depthwise():
    network = Network((1, 16, 12, 12), 96, target=NEON)
    (joined,) = (
        function
        for _, function in network.ir_mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and names_of(function.body.block.body) == {JOINED}
    )
    assert re.search(MULTIPLY_ADD, assembly(joined, NEON))


@pytest.mark.parametrize(
    ("describe", "shape", "rule", "instruction"),
    [
        (
            lambda _, x: op.nn.max_pool2d(x, (3, 3), layout="NHWC"),
            (1, 8, 8, 16),
            "pooling",
            MAXIMUM,
        ),
        (lambda _, x: op.nn.avg_pool2d(x, (3, 3), layout="NHWC"), (1, 8, 8, 16), "pooling", ADD),
        (lambda _, x: op.sum(x, -1), (6, 64), "reduction", ADD),
        (lambda _, x: op.sum(x, 0), (64, 6), "column reduction", ADD),
        (lambda _, x: op.max(x, -1), (6, 64), "reduction", INTEGER_MAXIMUM),
        (lambda _, x: op.nn.softmax(x), (6, 64), "reduction", ADD),
    ],
)
def test_pools_and_reductions(
    describe: Describe, shape: tuple[int, ...], rule: str, instruction: str
):
    built = build(describe, [random(*shape)], target=NEON)
    assert built.rules == {rule}
    assert re.search(instruction, built.assembly())


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "log", "sin"])
def test_functions(name: str):
    text = build(lambda _, x: getattr(op, name)(x), [random(64)], target=NEON).assembly()
    assert re.search(MULTIPLY_ADD, text)
    assert bool(re.search(CALL, text)) == (name == "sin")  # for a huge argument
