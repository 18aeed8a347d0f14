"""Tiles of sums in registers: their axes are found by name, at any position."""

from __future__ import annotations

import pytest
from tvm import s_tir, te, tirx

from tvmify.compiler.kernels.common.axes import LANE, ROW, AxisError, loops_along, named
from tvmify.compiler.kernels.common.loops import keep_in_registers
from tvmify.compiler.microarchitecture import Microarchitecture

MACHINE = Microarchitecture(256, 16, 48 << 10, 1 << 20, memory_operands=True)


def _product(*names: str) -> s_tir.Schedule:
    """Return sums over "k"; the store has all of their other axes, too."""
    extents = {ROW: 5, LANE: 8, "other": 7}
    shape = [extents[name] for name in names]
    x = te.placeholder((*shape, 16), "float32", name="x")
    k = te.reduce_axis((0, 16), "k")
    sums = te.compute(
        shape, lambda *i: te.sum(x[(*i, k)], k), name="sums", attrs=named(*names, "k")
    )
    store = te.compute(shape, lambda *i: sums[i], name="store", attrs=named(*names))
    function = te.create_prim_func([x, store])
    assert isinstance(function, tirx.PrimFunc)
    return s_tir.Schedule(function)


@pytest.mark.parametrize("names", [(ROW, LANE), ("other", ROW, LANE), (ROW, "other", LANE)])
def test_tiles_are_kept_whatever_axes_there_are(names: tuple[str, ...]):
    sch = _product(*names)
    sums, store = sch.get_sblock("sums"), sch.get_sblock("store")
    stored = loops_along(sch, store, ROW, LANE)
    keep_in_registers(sch, sums, stored, MACHINE, reduced=["k"])
    kinds = {
        int(loop.extent): loop.kind
        for loop in map(sch.get, sch.get_loops(sch.get_sblock("sums_update")))
        if int(loop.extent) in (5, 7)
    }
    assert kinds.pop(5) == tirx.ForKind.UNROLLED
    assert set(kinds.values()) <= {tirx.ForKind.SERIAL}
    rows, lanes = map(sch.get, stored)
    assert (rows.kind, lanes.kind) == (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED)


def test_tile_along_an_unknown_axis_is_an_error():
    sch = _product(ROW, LANE)
    stored = loops_along(sch, sch.get_sblock("store"), ROW, LANE)
    with pytest.raises(AxisError, match="'sums' has no axis 'input'"):
        keep_in_registers(sch, sch.get_sblock("sums"), stored, MACHINE, reduced=["input"])
