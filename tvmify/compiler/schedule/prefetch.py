"""Fetching the weights of later steps while those of the present one are multiplied.

Weights of a model do not fit the caches: each comes from memory once per call. The processor's own
prefetcher sees a new block only when the first tile of rows reads it, and that tile waits; so the
steps before it ask for the lines, spread evenly over all of them. A lone tile, which reads each
weight once, asks for what it reads some steps later: nothing else would hide the way from memory,
and the processor's own prefetcher stops at the end of every page.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from tvm import s_tir, sym, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import Buffer, Stmt

from tvmify.compiler.schedule.microarchitecture import bits_of
from tvmify.compiler.schedule.rewriting import rewrite_body

#: Annotation of the loop along a block of the reduction: the cache to fetch into, tiles that the
#: block meets, and which iteration variables number them.
_PREFETCH = "tvmify.prefetch"
#: Bytes that memory hands out at once, on all processors of interest.
_LINE = 64
#: Bytes that are on their way from memory to a core while it reads; twice and half of it are
#: slower (products of 1 to 12 rows, measured).
_DISTANCE = 2048
#: As LLVM numbers them. The second cache has buffers for more lines that are on their way from
#: memory than the first; from there to the first the processor's own prefetcher is fast enough.
_TO_READ, _FIRST_CACHE, _SECOND_CACHE, _DATA = 0, 3, 2, 1


def fetch_ahead(
    sch: s_tir.Schedule, loop: LoopRV, tiles: int, numbers: list[int], nearby: bool = False
) -> None:
    """Ask `insert_prefetches` to fetch ahead in this loop.

    Parameters
    ----------
    loop
        The innermost loop along the reduction, around a tile of sums.
    tiles
        How many tiles meet one block of the panel.
    numbers
        Which iteration variables of the tile's block number the tiles, the innermost last.
    nearby
        Whether all weights stay in the second cache from call to call. A lone tile reads them from
        there as they are.
    """
    if tiles > 1 or not nearby:
        sch.annotate(loop, _PREFETCH, [_FIRST_CACHE if nearby else _SECOND_CACHE, tiles, *numbers])


def insert_prefetches(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the prefetches into the loops that `fetch_ahead` marked."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or _PREFETCH not in stmt.annotations:
            return None
        body = tirx.SeqStmt([*_prefetches(stmt), stmt.body])
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body)

    return rewrite_body(function, visit)


def _prefetches(loop: tirx.For) -> Iterator[Stmt]:
    marks = loop.annotations[_PREFETCH]
    cache, tiles, *numbers = (int(value) for value in marks)  # type: ignore[attr-defined]
    panel = _Panel.of(loop)
    step = _flat(panel.reduced)
    if tiles == 1:
        first = step * panel.columns + _DISTANCE // panel.element_bytes
        return panel.fetch(first, panel.columns, cache)
    # Every step asks for its share of the next block; with many tiles, a part of a line.
    share = -(-panel.columns // tiles)
    number = _flat([panel.variables[i] for i in numbers]) % tiles
    return panel.fetch(panel.steps * (panel.columns + number * share) + step * share, share, cache)


class _Panel(NamedTuple):
    """The weights that one block of the reduction reads.

    Attributes
    ----------
    source, start
        Where they lie, and the index of the first of them.
    columns, steps
        How many each step reads, and the number of steps.
    variables, reduced
        The iteration variables of a tile with their values, and those along the reduction.
    """

    source: Buffer
    start: list[Expr]
    columns: int
    steps: int
    variables: list[tuple[tirx.IterVar, Expr]]
    reduced: list[tuple[tirx.IterVar, Expr]]

    @classmethod
    def of(cls, loop: tirx.For) -> _Panel:
        tile, analyzer = loop.body, sym.Analyzer()
        while isinstance(tile, tirx.For):  # rows and columns: the first of each
            analyzer.bind(tile.loop_var, tirx.const(0, "int64"))
            tile = tile.body
        block = tile.block
        variables = list(zip(block.iter_vars, tile.iter_values, strict=True))
        reduced = [v for v in variables if int(v[0].iter_type) == tirx.IterVar.CommReduce]
        lane = block.iter_vars[-1 - len(reduced)]
        for i, (variable, value) in enumerate(variables):
            start = value if i < len(variables) - len(reduced) else tirx.const(0, "int64")
            analyzer.bind(variable.var, analyzer.simplify(start))
        read = next(
            region
            for region in block.reads
            if not region.source.same_as(block.writes[0].source)
            and region.region[-1].min.same_as(lane.var)
        )
        start = [analyzer.simplify(axis.min) for axis in read.region]
        steps = prod(int(v.dom.extent) for v, _ in reduced)
        return cls(read.source, start, int(lane.dom.extent), steps, variables, reduced)

    @property
    def element_bytes(self) -> int:
        return bits_of(str(self.source.dtype)) // 8

    def fetch(self, distance: Expr, count: int, cache: int) -> Iterator[Stmt]:
        """Fetch so many elements, from a distance after the start on."""
        hints = [tirx.const(value, "int32") for value in (_TO_READ, cache, _DATA)]
        for first in range(0, count, _LINE // self.element_bytes):
            # Blocks follow one another in memory, through all panels: an index past the end of an
            # axis is the next block all the same, and past the last block a prefetch does nothing.
            index = [*self.start[:-1], distance + first]
            address = tirx.op.address_of(tirx.BufferLoad(self.source, index))
            yield tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *hints))


def _flat(variables: list[tuple[tirx.IterVar, Expr]]) -> Expr:
    """Number the iterations of some variables, given with their values, through."""
    number: Expr = tirx.const(0, "int64")
    for variable, value in variables:
        number = number * variable.dom.extent + value
    return number
