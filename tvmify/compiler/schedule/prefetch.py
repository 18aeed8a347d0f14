"""Fetching the next block of a panel of weights while the present one is multiplied.

Weights of a model do not fit the caches: each comes from memory once per call. The processor's own
prefetcher sees a new block only when the first tile of rows reads it, and that tile waits; so the
steps before it ask for the lines, spread evenly over all of them.
"""

from __future__ import annotations

from tvm import s_tir, sym, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import Stmt

from tvmify.compiler.schedule.microarchitecture import bits_of
from tvmify.compiler.schedule.rewriting import rewrite_body

#: Annotation of the loop along a block of the reduction: tiles of rows that the block meets.
_PREFETCH = "tvmify.prefetch"
#: Bytes that memory hands out at once, on all processors of interest.
_LINE = 64


def fetch_next_block(sch: s_tir.Schedule, loop: LoopRV, row_tiles: int) -> None:
    """Ask `insert_prefetches` to fetch ahead in this loop.

    Parameters
    ----------
    loop
        The loop along the reduction, around a tile of sums.
    row_tiles
        How many tiles of rows meet one block of the panel, hence how often the loop runs.
    """
    sch.annotate(loop, _PREFETCH, row_tiles)


def insert_prefetches(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the prefetches into the loops that `fetch_next_block` marked."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or _PREFETCH not in stmt.annotations:
            return None
        body = tirx.SeqStmt([*_prefetches(stmt), stmt.body])
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body)

    return rewrite_body(function, visit)


def _prefetches(loop: tirx.For) -> list[Stmt]:
    row_tiles = int(loop.annotations[_PREFETCH])
    tile, analyzer = loop.body, sym.Analyzer()
    while isinstance(tile, tirx.For):  # rows and columns: the first of each
        analyzer.bind(tile.loop_var, tirx.const(0, "int64"))
        tile = tile.body
    block = tile.block
    row_tile, lane, along = (block.iter_vars[i].var for i in (-5, -2, -1))
    for variable, value in zip(block.iter_vars, tile.iter_values, strict=True):
        start = tirx.const(0, "int64") if variable.var.same_as(along) else value
        analyzer.bind(variable.var, analyzer.simplify(start))
    panel = next(
        region
        for region in block.reads
        if not region.source.same_as(block.writes[0].source) and region.region[-1].min.same_as(lane)
    )
    *outer, depth, _ = (analyzer.simplify(axis.min) for axis in panel.region)
    columns = int(block.iter_vars[-2].dom.extent)
    # Every step asks for its share of the next block; with many tiles of rows, a part of a line.
    share = -(-columns // row_tiles)
    step = analyzer.simplify(row_tile % row_tiles) * loop.extent + loop.loop_var
    per_line = _LINE * 8 // bits_of(str(panel.source.dtype))
    to_read = [tirx.const(value, "int32") for value in (0, 3, 1)]  # into the nearest data cache
    found: list[Stmt] = []
    for first in range(0, share, per_line):
        # Blocks follow one another in memory, through all panels: an index past the end of an
        # axis is the next block all the same, and past the last block a prefetch does nothing.
        index = [*outer, depth + loop.extent, step * share + first]
        address = tirx.op.address_of(tirx.BufferLoad(panel.source, index))
        found.append(tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *to_read)))
    return found
