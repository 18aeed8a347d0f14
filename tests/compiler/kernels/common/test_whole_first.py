"""Loops around vectors, in rows of any length: whole iterations have no conditions."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

from tests.compiler.kernels.kernels import loops, random
from tests.compiler.symbolic import EDGES, Symbolic, build, check

op = relax.op


def kernel(program: Symbolic) -> tirx.PrimFunc:
    functions = [function for _, function in program.ir_mod.functions_items()]
    (found,) = (f for f in functions if "tirx.is_scheduled" in (f.attrs or {}))
    return found


def adds_whole_vectors(loop: tirx.For) -> bool:
    """Whether a loop adds vectors of its operand without a condition."""
    return (
        loop.kind == tirx.ForKind.SERIAL
        and not isinstance(loop.extent, tirx.IntImm)
        and "v0[" in str(loop.body)
        and "T.vectorized" in str(loop.body)
        and "if " not in str(loop.body)
        and "T.where" not in str(loop.body)
    )


@pytest.mark.parametrize("axes", [[1], [1, 2]], ids=["one axis", "two axes"])
@pytest.mark.parametrize("hint", [48, 224])
def test_sums_along_rows(axes: list[int], hint: int) -> None:
    """With the larger hint, rows of two axes are summed in chunks of 128 steps."""
    shape = (3, "n", "m")[: 1 + len(axes)]
    program = build(lambda builder, x: op.mean(x, axes), [(shape, "float32")], hint=hint)
    assert program.rules == {"reduction"}
    assert any(map(adds_whole_vectors, loops(kernel(program))))
    for n in (*EDGES, 300):
        inputs = [random(3, *(n, n + 5)[: len(axes)])]
        check(program, lambda x: x.mean(tuple(axes)), inputs)


def test_maxima_and_sums_of_rows() -> None:
    program = build(lambda builder, x: op.nn.softmax(x, -1), [(("rows", "n"), "float32")])
    assert program.rules == {"reduction"}

    def softmax(x):
        exponentials = np.exp(x - x.max(-1, keepdims=True))
        return exponentials / exponentials.sum(-1, keepdims=True)

    for n in EDGES:
        check(program, softmax, [random(3, n)])


@pytest.mark.parametrize("rows", [2, "rows"])
def test_sums_across_rows(rows: int | str) -> None:
    """Several vectors of sums: if threads share the vectors, each iteration has conditions."""
    program = build(lambda builder, x: op.sum(x, [1]), [((rows, 40, "n"), "float32")], hint=200)
    assert program.rules == {"column reduction"}
    for n in (*EDGES, 130):
        check(program, lambda x: x.sum(1), [random(2, 40, n)])
