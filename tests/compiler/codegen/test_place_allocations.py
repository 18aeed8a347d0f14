"""Allocations are at the same places as with TVM's pass."""

from __future__ import annotations

import tvm
from tvm import s_tir, te, tirx

from tvmify.compiler.codegen.place_allocations import PlaceAllocations


def scheduled() -> tvm.IRModule:
    """A kernel that reads a number from every row, and then each row once."""
    x = te.placeholder((tirx.Var("n", "int64"), 16), name="x")
    first = te.compute((x.shape[0],), lambda i: x[i, 0] + 1, name="first")
    row = te.compute(x.shape, lambda i, j: x[i, j] - first[x.shape[0] - 1 - i], name="row")
    out = te.compute(x.shape, lambda i, j: row[i, 15 - j] * 2, name="out")
    sch = s_tir.Schedule(te.create_prim_func([x, out]))
    loop, _ = sch.get_loops(sch.get_sblock("out"))
    sch.compute_at(sch.get_sblock("row"), loop)
    return sch.mod


def test_each_is_where_tvm_puts_it():
    rest = [
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
    ours, theirs = (
        tvm.transform.Sequential([place, *rest])(scheduled())
        for place in (
            PlaceAllocations(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        )
    )
    tvm.ir.assert_structural_equal(ours, theirs)
    text = str(ours)
    assert text.index("first = T") < text.index("for ") < text.index("row = T")
