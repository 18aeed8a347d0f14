"""Transpose tiles in registers. `common/transposes.py` copies a tile to the stack and reads it
across, which LLVM does element by element. Here the rows of a square tile, as vectors, are
exchanged with each other in halves, quarters and so on, until they are its columns (Eklundh's
method): 64 shuffles for 16 × 16 elements, instead of 256 loads and insertions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import collect, rewrite, rewrite_body, substitute
from tvmify.compiler.kernels.common.transposes import ACROSS
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.sizes import factor, product

#: The sides of tiles that are transposed: how many elements vectors have.
_SIDES = (4, 8, 16)
_ONE = tirx.const(1, "int32")


@compiler_pass
class TransposeTiles:
    """Rewrite loops that read tiles across; runs on flat buffers and vectors, before unrolling."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        return rewrite_body(function, _visit)


def _visit(stmt: Stmt) -> Stmt | None:
    """Rewrite a sequence of copies to the stack and loops that read them across.

    A merged function has several such sequences in one: each tile is transposed where it is first
    read, after its own copy.
    """
    if not isinstance(stmt, tirx.SeqStmt):
        return None
    first = next((i for i, part in enumerate(stmt.seq) if _is_reader(part)), None)
    if first is None:
        return None
    square = _tiles(stmt.seq[first:])
    sides: dict[tirx.Var, int] = {}  # of the tiles that are transposed already

    def along(load: Expr) -> Expr | None:
        if not isinstance(load, TensorLoad) or load.source not in sides:
            return None
        (lanes,) = load.indices
        side = tirx.const(sides[load.source], "int32")
        # The last lanes of a row may be read apart, from a place further down the column.
        row, place = tirx.floormod(lanes.base, side), tirx.floordiv(lanes.base, side)
        return tirx.BufferLoad(load.source, [tirx.Ramp(row * side + place, _ONE, lanes.lanes)])

    def read_along(inner: Stmt) -> Stmt | None:
        if not isinstance(inner, tirx.BufferStore):
            return None
        return tirx.BufferStore(inner.buffer, substitute(inner.value, along), inner.indices)

    parts: list[Stmt] = []
    for part in stmt.seq:
        if _is_reader(part):
            new = {x: n for x, n in _tiles([part]).items() if x in square and x not in sides}
            parts += [each for tile, side in new.items() for each in _transposed(tile, side)]
            sides |= new
            parts.append(rewrite(part, read_along))
        else:
            parts.append(rewrite(rewrite(part, _visit), read_along))
    return tirx.SeqStmt(parts)


def _is_reader(part: Stmt) -> bool:
    """Whether a statement is a marked loop, or one of two that are chosen between."""
    if isinstance(part, tirx.IfThenElse):
        return _is_reader(part.then_case)
    return isinstance(part, tirx.For) and ACROSS in part.annotations


def _tiles(readers: Sequence[Stmt]) -> dict[tirx.Var, int]:
    """Return the square tiles that are only read across, and their sides."""
    found: dict[tirx.Var, int] = {}
    others: set[tirx.Var] = set()

    stores = [store for part in readers for store in collect(part, tirx.BufferStore)]
    for load in (load for store in stores for load in collect(store.value, TensorLoad)):
        if str(load.source.scope()) == "local":
            side = _side(load)
            if side is None:
                others.add(load.source)
            else:
                found[load.source] = side
    return {tile: side for tile, side in found.items() if tile not in others}


def _side(load: TensorLoad) -> int | None:
    """Return the side of a square tile of which a column is loaded; None for anything else."""
    (lanes,) = load.indices
    if not isinstance(lanes, tirx.Ramp) or not isinstance(lanes.stride, tirx.IntImm):
        return None
    side, size = int(lanes.stride), factor(product(load.source.ty.shape))
    return side if side in _SIDES and size == side * side else None


def _transposed(tile: tirx.Var, side: int) -> list[Stmt]:
    """Return the statements that transpose a tile in place."""
    kind = f"{tile.ty.dtype}x{side}"
    places = [tirx.Ramp(tirx.const(row * side, "int32"), _ONE, side) for row in range(side)]
    parts: list[Stmt] = []

    def bound(value: Expr) -> tirx.Var:
        variable = tirx.Var("row", kind)
        parts.append(tirx.Bind(variable, value))
        return variable

    rows = [bound(tirx.BufferLoad(tile, [place])) for place in places]
    width = side // 2
    while width:
        # Of each square of 2 width, the upper right and the lower left quarter change places.
        upper = [lane - width + side if lane & width else lane for lane in range(side)]
        lower = [lane + side if lane & width else lane + width for lane in range(side)]
        for row in (row for row in range(side) if not row & width):
            pair = [rows[row], rows[row + width]]
            for target, order in ((row, upper), (row + width, lower)):
                lanes = [tirx.const(lane, "int32") for lane in order]
                rows[target] = bound(tirx.Shuffle(pair, lanes))
        width //= 2
    parts += [tirx.BufferStore(tile, row, [at]) for row, at in zip(rows, places, strict=True)]
    return parts
