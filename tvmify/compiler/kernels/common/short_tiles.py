"""Other versions of a tile of sums, with a third and two thirds of the rows. Tiles are as high as
suits the likely number of rows. Where that is a symbol, the last tile would compute all its rows,
of which few may be there: with 13 rows in tiles of 6, five of 18 for nothing. The lowest version
with as many rows as are there computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_PARTS = 3


def short_heights(rows: int, vectors: int) -> list[int]:
    """Return the rows of the other versions of a tile, ascending.

    Parameters
    ----------
    rows, vectors
        The rows of the tile, and the vectors of sums in a row. A version has so many sums that the
        latency of one multiply-add is hidden by the others.
    """
    heights = {-(-rows * part // _PARTS) for part in range(1, _PARTS)} - {rows}
    return sorted(height for height in heights if height * vectors >= TILE.fewest_sums)


def allow_short_tiles(
    sch: s_tir.Schedule, loop: LoopRV, count: Size, rows: int, vectors: int
) -> None:
    """Mark a loop over tiles of rows for `split_short_tiles`.

    Parameters
    ----------
    count
        How many rows there are; nothing is marked unless that is a symbol, and likely small.
    rows, vectors
        The rows of a tile, and the vectors of sums in a row.
    """
    if not sizes.is_static(count) and sizes.hint(count) <= TILE.few_tiles * rows:
        sch.annotate(loop, _SHORT, [written(count), rows, *short_heights(rows, vectors)])


def split_short_tiles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give the marked loops other bodies, for tiles with fewer rows."""

    def split(loop: tirx.For, marks: Sequence[Any]) -> Stmt:
        count, (rows, *heights) = size_of(marks[0], function), map(int, marks[1:])
        left = count - _outside(_values(loop.body, _TILE)[0], loop.body) * rows
        body = loop.body
        for height in reversed(heights):
            version = with_new_variables(_with_rows(loop.body, height))
            body = tirx.IfThenElse(left <= height, version, body)
        return with_loop_body(loop, body)

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
