"""Where conditions on the position in a row change."""

from __future__ import annotations

from tvm import s_tir, te, tirx

from tvmify.compiler.kernels.elementwise.turns import Pieces, pieces_of


def _row(*lengths: tirx.Var) -> Pieces:
    """Return the pieces of a row that is 1 up to a length, then 2 up to another, and so on."""

    def element(i: tirx.Var) -> tirx.PrimExpr:
        value = tirx.const(0.0)
        for number, length in reversed([*enumerate(lengths, 1)]):
            value = tirx.if_then_else(i < length, tirx.const(float(number)), value)
        return value

    tensors = [te.placeholder((length,), name="x") for length in lengths]
    function = te.create_prim_func(
        [*tensors, te.compute((tirx.const(200, "int64"),), element, "out")]
    )
    assert isinstance(function, tirx.PrimFunc)
    sch = s_tir.Schedule(function)
    return pieces_of(sch.get(sch.get_sblock("out")))


def test_equal_conditions_turn_at_the_same_place():
    n = tirx.Var("n", "int64")
    assert len(list(_row(n, n))) == 2


def test_conditions_on_two_symbols_may_turn_in_any_order():
    assert _row(*(tirx.Var(name, "int64") for name in ("n", "m"))).turns == {}
