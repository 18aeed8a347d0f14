"""Bounds for sizes that must not be symbols, and the ends of loops."""

from __future__ import annotations

import pytest
from tvm import relax, te, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import loops, random
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


def test_a_sum_ends_before_terms_that_are_zero():
    """Rows are summed in blocks of 112, however few there are."""
    program = symbolic.build(
        lambda _, x: relax.op.mean(x, [1, 2]), [(("b", 4, "h", "c"), "float32")], hint=224
    )
    kernel = next(f for v, f in program.ir_mod.functions_items() if "sum" in v.name_hint)
    extents = {str(loop.extent) for loop in loops(kernel)}
    assert "T.int64(112)" not in extents
    assert any("112" in extent and "h - " in extent for extent in extents)
    for rows in (2, 7, 8, 9, 15, 16, 17, 111, 112, 113, 225):
        symbolic.check(program, lambda x: x.mean((1, 2)), [random(2, 4, rows, 19)])
