"""Fetching the next block of a panel of weights while the present one is multiplied.

Weights of a model do not fit the caches: each comes from memory once per call. The processor's own
prefetcher sees a new block only when the first tile of rows reads it, and that tile waits; so the
steps before it ask for the lines, spread evenly over all of them.
"""

from __future__ import annotations

from math import prod

from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import Stmt

from tvmify.compiler.schedule.microarchitecture import bits_of
from tvmify.compiler.schedule.rewriting import rewrite_body

#: Annotation of the loop along a block of the reduction: tiles of rows that the block meets.
_PREFETCH = "tvmify.prefetch"
#: Bytes that memory hands out at once, on all processors of interest.
_LINE = 64


def fetch_next_block(sch: s_tir.Schedule, loop: LoopRV, tiles: int, numbers: list[int]) -> None:
    """Ask `insert_prefetches` to fetch ahead in this loop.

    Parameters
    ----------
    loop
        The innermost loop along the reduction, around a tile of sums.
    tiles
        How many tiles meet one block of the panel.
    numbers
        Which iteration variables of the tile's block number the tiles, the innermost last.
    """
    sch.annotate(loop, _PREFETCH, [tiles, *numbers])


def insert_prefetches(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the prefetches into the loops that `fetch_next_block` marked."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or _PREFETCH not in stmt.annotations:
            return None
        body = tirx.SeqStmt([*_prefetches(stmt), stmt.body])
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body)

    return rewrite_body(function, visit)


def _prefetches(loop: tirx.For) -> list[Stmt]:
    marks = loop.annotations[_PREFETCH]
    tiles, *numbers = (int(value) for value in marks)  # type: ignore[attr-defined]
    tile, analyzer = loop.body, sym.Analyzer()
    while isinstance(tile, tirx.For):  # rows and columns: the first of each
        analyzer.bind(tile.loop_var, tirx.const(0, "int64"))
        tile = tile.body
    block = tile.block
    variables = list(zip(block.iter_vars, tile.iter_values, strict=True))
    number = _flat([variables[i] for i in numbers]) % tiles
    reduced = [v for v in variables if int(v[0].iter_type) == tirx.IterVar.CommReduce]
    lane = block.iter_vars[-1 - len(reduced)]
    for i, (variable, value) in enumerate(variables):
        start = value if i < len(variables) - len(reduced) else tirx.const(0, "int64")
        analyzer.bind(variable.var, analyzer.simplify(start))
    panel = next(
        region
        for region in block.reads
        if not region.source.same_as(block.writes[0].source)
        and region.region[-1].min.same_as(lane.var)
    )
    *outer, _ = (analyzer.simplify(axis.min) for axis in panel.region)
    columns, steps = int(lane.dom.extent), prod(int(v.dom.extent) for v, _ in reduced)
    # Every step asks for its share of the next block; with many tiles, a part of a line.
    share = -(-columns // tiles)
    step = number * steps + _flat(reduced)
    per_line = _LINE * 8 // bits_of(str(panel.source.dtype))
    to_read = [tirx.const(value, "int32") for value in (0, 3, 1)]  # into the nearest data cache
    found: list[Stmt] = []
    for first in range(0, share, per_line):
        # Blocks follow one another in memory, through all panels: an index past the end of an
        # axis is the next block all the same, and past the last block a prefetch does nothing.
        index = [*outer, steps * columns + step * share + first]
        address = tirx.op.address_of(tirx.BufferLoad(panel.source, index))
        found.append(tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *to_read)))
    return found


def _flat(variables: list[tuple[tirx.IterVar, Expr]]) -> Expr:
    """Number the iterations of some variables, given with their values, through."""
    number: Expr = tirx.const(0, "int64")
    for variable, value in variables:
        number = number * variable.dom.extent + value
    return number
