"""A second version of a tile of sums, with half the rows. Tiles are as high as suits the likely
number of rows. Where that is a symbol, the last tile would compute all of its rows, of which few
may be there: with 17 rows in tiles of 8, every third row for nothing. Where at most half of them
are there, the second version computes them.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.costs import TILE
from tvmify.compiler.kernels.common.axes import ROW, value_along
from tvmify.compiler.kernels.common.bounds import size_of, written
from tvmify.compiler.kernels.common.rewriting import (
    rewrite,
    rewrite_loops,
    substitute,
    with_loop_body,
    with_new_variables,
)
from tvmify.compiler.sizes import Size

#: Annotation of the loop over tiles of rows: how many rows there are, and how many a tile has.
_SHORT = "tvmify.short_tile"
#: The name of the axis that numbers the tiles.
_TILE = "row_tile"


def short_rows(rows: int) -> int:
    """Return the rows of the second version of a tile."""
    return -(-rows // 2)


def half_last_tile(sch: s_tir.Schedule, loop: LoopRV, count: Size, rows: int) -> None:
    """Mark a loop over tiles of rows for `split_short_tiles`.

    Parameters
    ----------
    count
        How many rows there are; nothing is marked unless that is a symbol, and likely small.
    rows
        How many rows a tile has.
    """
    if not sizes.is_static(count) and rows > 1 and sizes.hint(count) <= TILE.few_tiles * rows:
        sch.annotate(loop, _SHORT, [written(count), rows])


def split_short_tiles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give the marked loops a second body, for tiles with at most half of their rows."""

    def split(loop: tirx.For, marks: tuple[Any, Any]) -> Stmt:
        count, rows = size_of(marks[0], function), int(marks[1])
        half = short_rows(rows)
        short = with_new_variables(_with_rows(loop.body, half))
        left = count - _outside(_values(loop.body, _TILE)[0], loop.body) * rows
        return with_loop_body(loop, tirx.IfThenElse(left <= half, short, loop.body))

    return rewrite_loops(function, _SHORT, split)


def _values(body: Stmt, name: str) -> list[Expr]:
    """Return the values that an axis has in those blocks of a body that have it."""
    found: list[Expr] = []

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, s_tir.SBlockRealize):
            return None
        value = value_along(stmt, name)
        if value is not None:
            found.append(value)
        return stmt

    rewrite(body, visit)
    return found


def _outside(value: Expr, body: Stmt) -> Expr:
    """Return the value of an axis at the first iteration of the loops of a body."""
    inner: list[tirx.Var] = []

    def visit(stmt: Stmt) -> Stmt | None:
        if isinstance(stmt, tirx.For):
            inner.append(stmt.loop_var)
        return stmt if isinstance(stmt, s_tir.SBlockRealize) else None

    rewrite(body, visit)

    def begun(node: Expr) -> Expr | None:
        is_inner = any(node.same_as(variable) for variable in inner)
        return tirx.const(0, str(node.ty.dtype)) if is_inner else None

    return sym.Analyzer().simplify(substitute(value, begun))


def _with_rows(body: Stmt, rows: int) -> Stmt:
    """Return a body whose loops over the rows of a tile are shorter."""
    along = [value for value in _values(body, ROW) if isinstance(value, tirx.Var)]

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For):
            return None
        extent = stmt.extent
        if any(stmt.loop_var.same_as(row) for row in along) and sizes.is_static(extent):
            extent = tirx.const(min(int(extent), rows), str(stmt.loop_var.ty.dtype))
        inside, annotations = rewrite(stmt.body, visit), stmt.annotations
        return tirx.For(stmt.loop_var, stmt.min, extent, stmt.kind, inside, annotations=annotations)

    return rewrite(body, visit)
