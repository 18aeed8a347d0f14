"""The names of axes: found at any position, and an error if they are missing."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx

from tests.compiler.kernels.kernels import build, random
from tvmify.compiler.kernels.common.axes import (
    Axes,
    AxisError,
    forget_axes,
    loops_along,
    named,
    own_loops,
)
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue


def _sums(*names: str) -> tirx.PrimFunc:
    x = te.placeholder((3, 5, 7), name="x")
    k = te.reduce_axis((0, 7), "k")
    attributes = named(*names) if names else {}
    total = te.compute((3, 5), lambda i, j: te.sum(x[i, j, k], k), name="sums", attrs=attributes)
    function = te.create_prim_func([x, total])
    assert isinstance(function, tirx.PrimFunc)
    return function


def _axes(function: tirx.PrimFunc) -> Axes:
    sch = s_tir.Schedule(function)
    return Axes.of(sch.get(sch.get_sblock("sums")))


def test_axes_are_found_by_name():
    axes = _axes(_sums("row", "lane", "k"))
    assert axes.extents("k", "row") == (7, 3)
    assert axes.position("lane") == 1
    assert "k" in axes
    assert "block" not in axes


def test_error_lists_the_axis_names():
    with pytest.raises(AxisError, match="'sums' has no axis 'block', but: row, lane, k"):
        _axes(_sums("row", "lane", "k")).extent("block")


@pytest.mark.parametrize("names", [(), ("row", "lane"), ("row", "row", "k"), tuple("abcd")])
def test_unnamed_axis_is_an_error(names: tuple[str, ...]):
    with pytest.raises(AxisError, match="'sums' has 3 axes"):
        _axes(_sums(*names))


def test_only_names_are_removed():
    plain, with_names = _sums(), _sums("row", "lane", "k")
    assert not tvm_ffi.structural_equal(with_names, plain)
    tvm.ir.assert_structural_equal(forget_axes(with_names), plain)


def test_scheduled_functions_have_none():
    def product(_: object, x: tvm.relax.Var, y: tvm.relax.Var) -> tvm.relax.Expr:
        return tvm.relax.op.matmul(x, y)

    kernel = build(product, [random(8, 16)], [random(16, 32)]).kernel()
    assert "matmul_tile" in kernel.script()
    assert "tvmify.axes" not in kernel.script()


def test_loops_are_found_by_the_names_of_axes():
    sch = s_tir.Schedule(_sums("row", "lane", "k"))
    loops = own_loops(sch, sch.get_sblock("sums"))
    extents = {name: int(sch.get(loop).extent) for name, loop in loops.items()}
    assert extents == {"row": 3, "lane": 5, "k": 7}


def test_loops_are_found_in_any_order():
    sch = s_tir.Schedule(_sums("row", "lane", "k"))
    found = loops_along(sch, sch.get_sblock("sums"), "k", "row")
    assert [int(sch.get(loop).extent) for loop in found] == [7, 3]
    with pytest.raises(AxisError, match="no axis 'block'"):
        loops_along(sch, sch.get_sblock("sums"), "block")


@pytest.mark.parametrize("last", ["same", "reshaped"])
def test_fused_epilogue_keeps_axis_names(last: str):
    x = te.placeholder((3, 5, 7), name="x")
    k = te.reduce_axis((0, 7), "k")
    total = te.compute((3, 5), lambda i, j: te.sum(x[i, j, k], k), name="sums")
    stored = te.compute(
        (3, 5), lambda i, j: total[i, j], name="store", attrs=named("row", "column")
    )
    out = (
        te.compute((3, 5), lambda i, j: stored[i, j] + 1.0, name="last")
        if last == "same"
        else te.compute((15,), lambda i: stored[i // 5, i % 5] + 1.0, name="last")
    )
    function = te.create_prim_func([x, out])
    assert isinstance(function, tirx.PrimFunc)
    sch = s_tir.Schedule(function)
    block, rest = fuse_epilogue(sch, "store")
    assert not rest
    extents = {name: int(sch.get(loop).extent) for name, loop in own_loops(sch, block).items()}
    assert extents == {"row": 3, "column": 5}
