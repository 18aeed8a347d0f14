"""Which functions read vectors of elements that lie close together, but not in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tvm
from tvm import s_tir, sym, tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import (
    DIVISIONS,
    collect,
    rewrite_body,
    uses,
    with_values,
)

#: Attribute of such a function, for `tvmify.compiler.codegen.shuffle_loads`.
SHUFFLES = "tvmify.shuffles"
#: What an index that moves lanes about contains.
_OUT_OF_ORDER = (tirx.Mul, tirx.Sub, *DIVISIONS)


def mark_shuffles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Mark a scheduled function if lanes of a vector are divided, multiplied or turned round.

    To search all loads of all functions once they are flat and unrolled would take as long as
    scheduling.
    """
    found = False

    def visit(stmt: Stmt) -> Stmt | None:
        nonlocal found
        if not isinstance(stmt, tirx.For) or stmt.kind != tirx.ForKind.VECTORIZED:
            return None
        store = stmt.body.block.body if isinstance(stmt.body, s_tir.SBlockRealize) else None
        if not isinstance(store, tirx.BufferStore):
            return stmt
        values = zip(stmt.body.block.iter_vars, stmt.body.iter_values, strict=True)
        of_lane = {axis.var: value for axis, value in values if uses(value, [stmt.loop_var])}
        found = found or _reads_out_of_order(store.value, of_lane, stmt)
        return _serial(stmt) if _fills_with_bfloat16(store.value, of_lane) else stmt

    function = rewrite_body(function, visit)
    return function.with_attr(SHUFFLES, True) if found else function


def _reads_out_of_order(value: Expr, of_lane: Mapping[tirx.Var, Expr], loop: tirx.For) -> bool:
    for load in collect(value, TensorLoad):
        for index in load.indices[-1:]:
            # The last check is the dearest.
            suspect = collect(index, _OUT_OF_ORDER) and uses(index, of_lane)
            if suspect and not _is_in_order(index, of_lane, loop):
                return True
    return False


def _is_in_order(index: Expr, of_lane: Mapping[tirx.Var, Expr], loop: tirx.For) -> bool:
    """Whether lanes read consecutive elements, or all the same one.

    As in ``channel % 24``, where vectors of 8 lanes begin at multiples of 8.
    """
    lane, analyzer = loop.loop_var, sym.Analyzer()
    first, lanes = tirx.const(0, str(lane.ty.dtype)), int(loop.extent)
    analyzer.bind(lane, tvm.ir.Range(first, loop.extent))
    zero = {lane: first}
    values: dict[tirx.Var, Expr] = {}
    for variable, value in of_lane.items():
        start = analyzer.simplify(with_values(value, zero))
        begins = analyzer.modular_set(start)
        if begins.coeff % lanes == 0 and begins.base % lanes == 0:
            number = tirx.Var("vector", str(variable.ty.dtype))
            values[variable] = number * lanes + analyzer.simplify(value - start)
        else:
            values[variable] = value
    there = with_values(index, values)
    distance = analyzer.simplify(there - with_values(there, zero))
    return distance.same_as(lane) or (isinstance(distance, tirx.IntImm) and int(distance) == 0)


def _fills_with_bfloat16(value: Expr, of_lane: Collection[tirx.Var]) -> bool:
    """Whether one element may be stored in all lanes: TVM cannot, in bfloat16."""
    kind = str(value.ty.dtype)
    while isinstance(value, tirx.Cast):  # to float32 and back, which TVM leaves out
        value = value.value
    if not isinstance(value, TensorLoad) or kind != "bfloat16" or not value.indices:
        return False
    index = value.indices[-1]
    return not isinstance(index, tirx.Var) or not uses(index, of_lane)


def _serial(loop: tirx.For) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
