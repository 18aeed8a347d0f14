"""Results have their own memory."""

from __future__ import annotations

import pytest
from tvm import relax, te

from tests.compiler.symbolic import build


def _without_two(builder, x):
    rows, columns = x.ty.shape.values
    shape = [rows - 2, columns]
    return builder.emit(
        builder.call_te(lambda x: te.compute(shape, lambda i, j: x(i + 2, j) * 2), x)
    )


@pytest.mark.parametrize("hint", [2, 48])
def test_results_never_share_memory(hint):
    """With two rows there are no elements to share; with other numbers there are."""

    def describe(builder, x):
        rest = _without_two(builder, x)
        rows, columns = rest.ty.shape.values
        return relax.Tuple([rest, builder.emit(relax.op.reshape(rest, [rows, 2, columns // 2]))])

    program = build(describe, [(("s0", 8), "float32")], hint=hint)
    assert "copy" in program.report
