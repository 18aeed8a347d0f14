"""Prefetches the weights of later steps while those of the current one are multiplied. Weights of a
model do not fit in the caches: each comes from memory once per call. The hardware prefetcher sees a
new block only when the first tile of rows reads it, and that tile waits. So the steps before
prefetch its cache lines, spread evenly over all steps; if blocks are small, also those of the block
after it. A single tile, which reads each weight once, prefetches what it reads some steps later:
nothing else would hide the latency of memory, and the hardware prefetcher stops at the end of every
page. Weights that are unpacked are prefetched twice: further ahead into L2, and then into L1.

The other operand of the next tile is prefetched where that pays: another core may have written it,
and the cores of a virtual machine may be far apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from tvm import s_tir, sym, tirx
from tvm.ir import Expr, TensorRegion
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.costs import PREFETCH
from tvmify.compiler.kernels.common.axes import LANE, ROW, Axes, value_along
from tvmify.compiler.kernels.common.bounds import size_of, written
from tvmify.compiler.kernels.common.rewriting import rewrite_loops, uses
from tvmify.compiler.kernels.common.short_tiles import short_heights
from tvmify.compiler.microarchitecture import bits_of
from tvmify.compiler.sizes import Size

#: Annotation of the loop along a block of the reduction: how many rows there are, the cache to
#: fetch into, tiles that the block meets, and meets at least, how many iteration variables number
#: the tiles, these, and those of the rows to fetch.
_PREFETCH = "tvmify.prefetch"
#: Attribute of a function that has such loops.
FETCHES = "tvmify.fetches_ahead"
#: Bytes of a cache line, on all processors of interest.
_LINE = 64
#: Where there may be as few tiles as this, there may be a single one as well.
_FEWEST = 2
#: LLVM's numbers of caches. L2 can have more lines in flight from memory than L1, and from L2 to L1
#: the hardware prefetcher is fast enough.
_TO_READ, _L1, _L2, _DATA = 0, 3, 2, 1


class VaryingRows(NamedTuple):
    """Rows whose number is a symbol.

    Attributes
    ----------
    count
        How many there are.
    fewest
        How many tiles meet one block of the panel, for the smallest likely number of rows.
    """

    count: Size
    fewest: int


def fetch_ahead(
    sch: s_tir.Schedule,
    block: SBlockRV,
    loop: LoopRV,
    tiles: int,
    numbers: Sequence[str],
    nearby: bool = False,
    rows: Sequence[str] = (),
    varying: VaryingRows | None = None,
) -> None:
    """Mark a loop for `insert_prefetches`.

    Parameters
    ----------
    block
        The tile of sums.
    loop
        The innermost loop along the reduction, around a tile of sums.
    tiles
        How many tiles meet one block of the panel.
    numbers
        The axes that number the tiles, the innermost last.
    nearby
        Whether L2 keeps all weights from call to call. A single tile then does not prefetch them.
    rows
        If the rows of the next tile are prefetched, too: the axes that number the tiles along the
        other operand, in the order of their loops. Another core wrote half of the activations that
        a core reads first, unless both kernels divide the rows alike (docs/measurements/memory.md).
    varying
        If their number is a symbol, the rows of all tiles.
    """
    count, fewest = varying or VaryingRows(0, tiles)
    if fewest > 1 or not nearby:
        cache = _L1 if nearby else _L2
        if tiles == 1:
            rows = ()
        axes = Axes.of(sch.get(block))
        positions = [axes.position(name) for name in (*numbers, *rows)]
        sch.annotate(
            loop, _PREFETCH, [written(count), cache, tiles, fewest, len(numbers), *positions]
        )


def insert_prefetches(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert prefetches into the marked loops."""

    def insert(loop: tirx.For, marks: Iterable[Any]) -> Stmt:
        body = _sequence([*_in_loop(loop, marks, function), loop.body])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)

    changed = rewrite_loops(function, _PREFETCH, insert)
    return function if changed.same_as(function) else changed.with_attr(FETCHES, True)


def prefetches(buffer: tirx.Var, index: list[Expr], count: int, cache: int = _L1) -> Iterator[Stmt]:
    """Prefetch `count` elements from an index on, by default into L1.

    An index past the end of an axis is what follows in memory all the same, and past the end of the
    buffer a prefetch does nothing.
    """
    hints = [tirx.const(value, "int32") for value in (_TO_READ, cache, _DATA)]
    for first in range(0, count, _LINE // _bytes(buffer)):
        address = tirx.op.address_of(tirx.BufferLoad(buffer, [*index[:-1], index[-1] + first]))
        yield tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *hints))


def _in_loop(loop: tirx.For, marks: Iterable[Any], function: tirx.PrimFunc) -> Iterator[Stmt]:
    rows, *others = marks
    count = size_of(rows, function)
    cache, tiles, fewest, numbered, *numbers = map(int, others)
    numbers, following = numbers[:numbered], numbers[numbered:]
    tile = _Tile.in_loop(loop)
    next_rows = list(_next_rows(tile, following)) if following else []
    panel, start = tile.panel.source, tile.start(tile.panel)
    columns, step = int(panel.shape[-1]), tile.step
    ahead = [cache]
    if cache != _L1 and tile.steps * columns * _bytes(panel) <= PREFETCH.small_block:
        ahead = [_L1, cache]
    if fewest > 1 and not sizes.is_static(count):
        varying = VaryingRows(count, fewest)
        yield from _for_varying_rows(tile, ahead, numbers, tiles, varying, next_rows)
        return
    yield from next_rows
    if fewest > 1:
        # Every step asks for its share of the next block; with many tiles, a part of a line.
        position = _flat([tile.variables[i] for i in numbers])
        number, share = position % tiles, -(-columns // tiles)
        for blocks, into in enumerate(ahead, 1):
            distance = tile.steps * (blocks * columns + number * share) + step * share
            yield from prefetches(panel, _after(start, distance), share * tile.taken, into)
    elif _is_compact(tile.panel):
        yield from _own_lines(tile, PREFETCH.compact_distance, _L1)
        yield from _own_lines(tile, 2 * PREFETCH.compact_distance, _L2)
    elif not tile.is_quick:
        yield from _own_lines(tile, PREFETCH.distance, cache)


def _for_varying_rows(
    tile: _Tile,
    ahead: list[int],
    numbers: list[int],
    tiles: int,
    rows: VaryingRows,
    next_rows: list[Stmt],
) -> Iterator[Stmt]:
    """Fetch a part of the next block that is in proportion to the rows of the tile.

    The last block meets fewer tiles, and the last tile may be short.
    """
    panel, start = tile.panel.source, tile.start(tile.panel)
    columns, most = int(panel.shape[-1]), int(tile.row.dom.extent)
    position = _flat([tile.variables[i] for i in numbers])
    number = position % tiles
    before, total = position - number, prod(tile.variables[i][0].dom.extent for i in numbers)
    # In variables: otherwise each prefetch would repeat their computation.
    present, left, share, own = (tirx.Var(n, "int64") for n in ("present", "left", "share", "own"))
    yield tirx.Bind(present, tirx.min(total - before, tiles))
    yield tirx.Bind(left, rows.count - before * most)
    highest = max(short_heights(most, columns * _bytes(panel) // tile.vector), default=0)
    has_short = left - (present - 1) * most <= highest
    computed = tirx.Select(has_short, left, present * most)
    fetch: list[Stmt] = [
        tirx.Bind(share, tirx.truncdiv(columns * most + computed - 1, computed)),
        tirx.Bind(own, columns - number * share if tile.is_short else share),
    ]
    # There are as many prefetches as the fewest tiles need; several of more tiles are of one line.
    least = rows.fewest * most + (tile.height if tile.is_short else 0)
    count = -(-(-(-columns * tile.height // least) * tile.taken * _bytes(panel)) // _LINE)
    for blocks, into in enumerate(ahead, 1):
        distance = tile.steps * (blocks * columns + number * share) + tile.step * own
        for i in range(count):
            between = i * own * tile.taken // count
            fetch += prefetches(panel, _after(start, distance + between), 1, into)
    every = list(_all_lines(tile, ahead))
    if rows.fewest <= _FEWEST:
        # A tile and a short one would each wait for the other's lines.
        are_few = left <= most + highest
        fetch = [tirx.IfThenElse(are_few, _sequence(every), _sequence(fetch))]
    alone = None if tile.is_quick else _sequence(every)
    yield tirx.IfThenElse(present > 1, _sequence([*next_rows, *fetch]), alone)


def _all_lines(tile: _Tile, ahead: list[int]) -> Iterator[Stmt]:
    """Fetch all lines of the next block, which would be too many prefetches for many tiles."""
    panel, start = tile.panel.source, tile.start(tile.panel)
    columns = int(panel.shape[-1])
    for blocks, into in enumerate(ahead, 1):
        distance = tile.steps * blocks * columns + tile.step * columns
        yield from prefetches(panel, _after(start, distance), columns * tile.taken, into)


def _own_lines(tile: _Tile, ahead: int, cache: int) -> Iterator[Stmt]:
    """Fetch what the tile itself reads, a number of bytes further on."""
    panel, columns = tile.panel.source, int(tile.panel.source.shape[-1])
    distance = tile.step * columns + ahead // _bytes(panel)
    return prefetches(panel, _after(tile.start(tile.panel), distance), columns * tile.taken, cache)


def _sequence(statements: Iterable[Stmt]) -> Stmt:
    first, *others = statements
    return tirx.SeqStmt([first, *others]) if others else first


def _next_rows(tile: _Tile, numbers: Sequence[int]) -> Iterator[Stmt]:
    """Fetch rows of the next tile: all steps together pass over one row after the other.

    If a row ends within an iteration, the first elements of the next row are not fetched.
    """
    rows, left = int(tile.row.dom.extent), tile.left
    if not uses(left.region[-1].min, [variable.var for variable, _ in tile.reduced]):
        return  # a transposed operand, whose rows are not contiguous
    position = tile.step * rows
    rest = sizes.number_or_expression(left.source.shape[-1]) - tile.steps
    distance = position + position // tile.steps * rest
    start = tile.start(left, tile.following(numbers))
    yield from prefetches(left.source, _after(start, distance), rows * tile.taken)


class _Tile(NamedTuple):
    """The multiply-adds in a loop along a block of the reduction.

    Attributes
    ----------
    block
        What is computed: sums of products of a row and a lane.
    variables, reduced
        Its iteration variables with their values in the first row and lane, and those along the
        reduction.
    taken
        Steps of the reduction that an iteration takes; the values are those of the first.
    height
        The rows that it computes, fewer than others if it is short (see `short_tiles`).
    vector
        Bytes of a vector of sums.
    """

    block: tirx.SBlock
    variables: list[tuple[tirx.IterVar, Expr]]
    reduced: list[tuple[tirx.IterVar, Expr]]
    taken: int
    height: int
    vector: int

    @classmethod
    def in_loop(cls, loop: tirx.For) -> _Tile:
        """Read what a loop computes."""
        step, analyzer = loop.body, sym.Analyzer()
        tile, loops = step, []
        while isinstance(tile, tirx.For):  # steps, rows and columns: the first of each
            analyzer.bind(tile.loop_var, tirx.const(0, "int64"))
            loops.append(tile)
            tile = tile.body
        values = [analyzer.simplify(value) for value in tile.iter_values]
        variables = list(zip(tile.block.iter_vars, values, strict=True))
        reduced = [v for v in variables if int(v[0].iter_type) == tirx.IterVar.CommReduce]
        row = value_along(tile, ROW)
        heights = [int(x.extent) for x in loops if row is not None and x.loop_var.same_as(row)]
        height = heights[0] if heights else 1
        vector = int(loops[-1].extent) * _bytes(tile.block.writes[0].source)
        return cls(tile.block, variables, reduced, int(step.extent), height, vector)

    @property
    def row(self) -> tirx.IterVar:
        """The variable that numbers the rows of the tile."""
        return Axes.of(self.block)[ROW]

    @property
    def is_short(self) -> bool:
        """Whether it computes fewer rows than others."""
        return self.height < int(self.row.dom.extent)

    @property
    def is_quick(self) -> bool:
        """Whether a line of weights takes so few instructions that the core reads far ahead."""
        return self.height * _LINE <= PREFETCH.quick * self.vector

    @property
    def lane(self) -> tirx.IterVar:
        """The variable that numbers its columns."""
        return Axes.of(self.block)[LANE]

    @property
    def steps(self) -> int:
        """How many steps a block of the reduction has."""
        return prod(int(variable.dom.extent) for variable, _ in self.reduced)

    @property
    def step(self) -> Expr:
        """The number of the present one."""
        return _flat(self.reduced)

    @property
    def panel(self) -> TensorRegion:
        """The weights that it reads."""
        return next(region for region in self._factors if self._has_lanes(region))

    @property
    def left(self) -> TensorRegion:
        """The rows that it reads."""
        return next(region for region in self._factors if not self._has_lanes(region))

    @property
    def _factors(self) -> list[TensorRegion]:
        sums = self.block.writes[0].source
        return [region for region in self.block.reads if not region.source.same_as(sums)]

    def _has_lanes(self, region: TensorRegion) -> bool:
        return region.region[-1].min.same_as(self.lane.var) or _is_compact(region)

    def following(self, numbers: Sequence[int]) -> list[tuple[tirx.IterVar, Expr]]:
        """Return the iteration variables with their values in the tile that is next.

        `numbers` says which variables number tiles, in the order of their loops.
        """
        variables = list(self.variables)
        number = _flat([variables[i] for i in numbers]) + 1
        for i in reversed(numbers):
            variable, _ = variables[i]
            variables[i] = variable, number % variable.dom.extent
            number = number // variable.dom.extent
        return variables

    def start(
        self, region: TensorRegion, variables: list[tuple[tirx.IterVar, Expr]] | None = None
    ) -> list[Expr]:
        """Return the index of the first element that a block of the reduction reads of it.

        `variables` are those of another tile.
        """
        analyzer = sym.Analyzer()
        for variable, value in (variables or self.variables)[: -len(self.reduced)]:
            analyzer.bind(variable.var, analyzer.simplify(value))
        for variable, _ in self.reduced:
            analyzer.bind(variable.var, tirx.const(0, "int64"))
        return [analyzer.simplify(axis.min) for axis in region.region]


def _is_compact(region: TensorRegion) -> bool:
    """Whether these are compact weights, each of which is stored in several places."""
    return not isinstance(region.region[-1].extent, tirx.IntImm)


def _after(start: list[Expr], distance: Expr) -> list[Expr]:
    return [*start[:-1], start[-1] + distance]


def _bytes(buffer: tirx.Var) -> int:
    return bits_of(str(buffer.dtype)) // 8


def _flat(variables: list[tuple[tirx.IterVar, Expr]]) -> Expr:
    """Number the iterations of some variables, given with their values, consecutively."""
    number: Expr = tirx.const(0, "int64")
    for variable, value in variables:
        number = number * variable.dom.extent + value
    return number
