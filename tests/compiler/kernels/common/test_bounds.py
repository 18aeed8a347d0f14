"""Sizes that are written down where no symbol may be."""

from __future__ import annotations

import pytest
from tvm import te, tirx

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.bounds import size_of, written

B, S = tirx.Var("s0", "int64"), tirx.Var("s1", "int64")


@pytest.mark.parametrize(
    "size",
    [3, B, B * S, B + 1, 2 * B - S, (B + 1) // 2, B % 8 * S, tirx.min(B, S - 3), tirx.max(B, 1)],
    ids=str,
)
def test_bounds_round_trip(size):
    x = te.placeholder((B, S), name="x")
    function = te.create_prim_func([x, te.compute((B, S), lambda i, j: x[i, j], name="y")])
    assert sizes.same(size_of(written(size), function), size)
    assert isinstance(written(size), (int, str))


def test_invalid_size_is_not_recorded():
    with pytest.raises(ValueError, match="not a sum, product or quotient"):
        written(tirx.Select(B > 1, B, S))
