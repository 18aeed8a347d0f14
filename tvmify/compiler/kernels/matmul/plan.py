"""How a matrix product is cut: register tile, block of the reduction, rows that stay together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING

from tvmify.compiler.kernels.common import choice, tiles
from tvmify.compiler.microarchitecture import Microarchitecture

if TYPE_CHECKING:
    from tvmify.compiler.kernels.common.sample import Sample

#: One sum over more elements than this is less exact than the accuracy policy wants. With
#: ``accuracy="strict"`` it depends on how many there are, and may be short, but not shorter than
#: the second: for few rows, eager adds up in many lanes at once.
_LONGEST_SUM, _SHORTEST_STRICT_SUM = 1024, 16
#: Blocks that are all of one length are so many times shorter than they might be, at most: each
#: costs loads and stores.
_EVEN = 3
#: Sizes of one block of a panel, in sizes of the first cache. With the next block already on its
#: way, a little more than the cache holds is fast: what is added up is stored less often. Where all
#: weights stay in the second cache from call to call, that counts for more than the first one.
_PANELS, _NEARBY_PANELS = (1.25, 0.625), (1.25, 0.625, 4)
#: Tiles of so few rows read weights as fast as the first cache alone hands them out: for them a
#: block has to fit in there beside the next one (products of 4 rows, AVX2: a fifth faster).
_FEW_ROWS, _FEW_ROWS_PANELS = 2, (0.625,)
#: Blocks of rows that are considered: so many, or as many as make this many tasks.
_BLOCKS, _TASKS = (1, 2, 4, 8), (8, 16, 32)
#: How many register tiles are combined with everything else.
_TILES = 8
#: How many plans are listed for their estimates alone.
_RUNNERS_UP = 3
#: The estimate is the sum for machines of so many cores.
_CORES = (2, 4)
#: Nanoseconds of one cycle of `tiles.cycles`; per byte of weights that a core reads from memory,
#: and when it reads them again, twice that where nothing is fetched ahead; per byte of sums that
#: join those of other blocks; per byte of the left-hand side that a core reads again where the
#: second cache does not hold it; per byte of a large result that is written by columns; and of a
#: fork. All are what is left beside the multiply-adds, with blocks fetched ahead. Fitted (least
#: squares of relative errors, none negative, by a script that was not kept) to the times of 923
#: kernels within 13 %, as benchmarks/heuristic.py measures them; but 0.012, not 0.007, for the
#: left-hand side, since Whisper's took 0.87 of the time in blocks of rows on a Xeon.
_CYCLE, _FAR_BYTE, _NEAR_BYTE = 0.22, 0.035, 0.006
_SUM_BYTE, _LEFT_BYTE, _RESULT_BYTE, _FORK = 0.018, 0.012, 0.04, 1500.0
#: How much longer a tile waits for its weights that no other meets: nothing else hides the way,
#: unless the second cache keeps them. Since the fit: two tiles that share a block of others were
#: faster than one that is twice as high.
_LONE = 1.25
#: The multiply-adds of a block of more rows than this hide the way of its weights from memory, all
#: but a share that falls with their square. Since the fit: two cores that each read all weights
#: for half of 128 or 197 rows take 0.98 to 1.02 times as long as two that share them out (the
#: estimate had been 1.1), and MiniLM takes 0.96; two blocks of 26 or 32 rows that meet the same
#: weights, one after the other, take 1.1 to 1.28 times as long as one (AVX-512).
_HIDING = 32
#: Nanoseconds per byte of the left-hand side that a core reads beside its share of the rows, which
#: another core wrote. Since the fit: by rows, products of 14 × 14 images took 0.84 to 0.96 of the
#: time, and MobileNetV2 0.96; with 0.035, some are cut into blocks that are too short (AVX-512).
_FOREIGN_BYTE = 0.02
#: And per byte of weights that a tile reads from the second cache, because a block of the panel is
#: more than so many times as large as the first one. Since the fit: with AVX-512 the mean loss of
#: 145 products fell from 3.8 to 3.5 %, the largest from 34 to 23 %, with anything from 0.001 to
#: 0.005; with AVX2 no choice depends on it.
_SPILLED_BYTE, _SPILLS = 0.0014, 1.5
#: Rows so many bytes apart, or a multiple of it, have their lines in one set of the first cache; of
#: more than so many, some are gone before they are read to the end, and steps take so much longer
#: for each. Tiles of 10, 12 and 14 rows of 1024 or 2048 elements took 1.03, 1.15 and 1.33 times as
#: long as of 960, 1040 or 512 (Zen 4).
_ALIKE, _IN_A_SET, _CROWDED = 4096, 10, 0.08


@dataclass(frozen=True)
class Plan:
    """One way to cut a product.

    Attributes
    ----------
    rows, columns
        The tile of sums that stays in registers.
    depth
        Elements of the reduction that are added up in registers. The last block may have fewer.
    block
        Tiles of rows that meet a panel of the right-hand side one after the other.
    rows_first
        Whether all columns of one block of rows come before the next block.
    """

    rows: int
    columns: int
    depth: int
    block: int
    rows_first: bool

    def __str__(self) -> str:
        order = "rows" if self.rows_first else "columns"
        return f"{self.rows}x{self.columns} depth {self.depth} block {self.block} {order} first"


@dataclass(frozen=True)
class Workload:
    """One matrix product, or `batch` of them, of activations with weights or with activations.

    Attributes
    ----------
    packed
        Whether the right-hand side is a weight.
    apart
        How many rows of the left-hand side one row is from the next: as many as a stride says.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    dtype: str
    packed: bool
    apart: int = 1

    def __str__(self) -> str:
        kind = "packed matmul" if self.packed else "matmul"
        apart = f" apart {self.apart}" * (self.apart > 1)
        return f"{kind} {self.batch}x{self.rows}x{self.depth}x{self.columns} {self.dtype}{apart}"


def choose(
    work: Workload,
    machine: Microarchitecture,
    bits: int,
    sample: Callable[[], Sample] | None = None,
) -> Plan:
    """Choose a plan; the alternatives are there for measurements, see `choice.choose`."""
    return choice.choose(str(work), candidates(work, machine, bits), sample)


def lone(work: Workload, columns: int) -> Plan:
    """Return the plan in which all rows are one tile, of so many columns."""
    return Plan(work.rows, columns, split_evenly(work.depth, _LONGEST_SUM), 1, rows_first=False)


def candidates(work: Workload, machine: Microarchitecture, bits: int) -> list[Plan]:
    """Return the plans worth trying, the one estimated fastest first."""
    ranked = tiles.ranked(work.rows, work.columns, machine, bits)
    others = tiles.alternatives(ranked, lambda tile: tile.columns, lambda tile: tile.rows)
    considered = dict.fromkeys([*ranked[:_TILES], *others])
    plans = [plan for tile in considered for plan in _plans(work, tile, machine, bits)]

    def cost(plan: Plan) -> float:
        return sum(n * nanoseconds(work, plan, machine, bits, n) for n in _CORES)

    own, *rest = sorted(dict.fromkeys(plans), key=cost)
    # Those that differ in one thing, the best of each kind, and then by their estimates.
    kinds = [
        lambda plan: plan.columns != own.columns,
        lambda plan: (
            (plan.columns, plan.rows) == (own.columns, own.rows)
            and plan.rows_first != own.rows_first
        ),
        lambda plan: plan == replace(own, block=plan.block),
        lambda plan: plan == replace(own, depth=plan.depth),
        lambda plan: plan.columns == own.columns and plan.rows != own.rows,
    ]
    unlike = [next(filter(kind, rest), own) for kind in kinds]
    return list(dict.fromkeys([own, *unlike, *rest[:_RUNNERS_UP]]))


def _plans(
    work: Workload, tile: tiles.Tile, machine: Microarchitecture, bits: int
) -> Iterator[Plan]:
    weights = work.batch * work.depth * work.columns * bits // 8
    row_tiles = -(-work.rows // tile.rows)
    panels = work.batch * -(-work.columns // tile.columns)
    counts = {*_BLOCKS, *(-(-tasks // panels) for tasks in _TASKS)}
    # Rows of which the left-hand side stays in the second cache.
    nearby = machine.l2_bytes // 2 // (tile.rows * work.depth * bits // 8)
    counts.add(-(-row_tiles // max(nearby, 1)))
    if not work.packed:  # the right-hand side is copied as a whole for each block
        counts = {min(counts, key=lambda count: abs(count * panels - _TASKS[0]))}
    for block in {-(-row_tiles // min(count, row_tiles)) for count in counts}:
        longest = longest_sum(work.depth)
        parts = _NEARBY_PANELS if machine.keeps(weights) else _PANELS
        if tile.rows <= _FEW_ROWS:
            parts = _FEW_ROWS_PANELS
        sizes = [int(machine.l1_bytes * part) // (tile.columns * bits // 8) for part in parts]
        # A single tile of rows reads the panel in one stream.
        limits = {min(longest, size) if block > 1 else longest for size in sizes}
        for depth in {split_evenly(work.depth, limit) for limit in limits}:
            for rows_first in (False, True)[: 1 + work.packed]:
                yield Plan(tile.rows, tile.columns, depth, block, rows_first)


def nanoseconds(
    work: Workload, plan: Plan, machine: Microarchitecture, bits: int, cores: int
) -> float:
    """Estimate how long a plan takes on so many cores: what the busiest of them does."""
    row_tiles, panels = -(-work.rows // plan.rows), -(-work.columns // plan.columns)
    blocks, element = -(-row_tiles // plan.block), bits // 8
    left, right, result = (
        work.batch * element * a * b
        for a, b in (
            (work.rows, work.depth),
            (work.depth, panels * plan.columns),
            (work.rows, work.columns),
        )
    )
    tasks = work.batch * blocks * panels
    multiply_adds = float(work.batch * work.rows * work.depth * work.columns)
    forks = tasks > 1 and machine.worth_threads(multiply_adds, left + right + result)
    cores = min(cores, tasks) if forks else 1
    steps = -(-tasks // cores) * plan.block * work.depth
    tile = tiles.Tile(plan.rows, plan.columns)
    time = steps * tiles.cycles(tile, machine, bits, work.columns) * _CYCLE
    if work.depth * work.apart * element % _ALIKE == 0:
        time *= 1 + max(plan.rows - _IN_A_SET, 0) * _CROWDED
    # By columns each core reads weights of its own, by rows each reads all of them.
    far = right if plan.rows_first and blocks > 1 else right / cores
    near = max(right * blocks / cores - far, 0) * (1 if plan.block > 1 else 2)
    far *= _LONE if plan.block == 1 and not machine.keeps(right) else 1
    far *= min(1, _HIDING / (plan.block * plan.rows)) ** 2
    time += far * _FAR_BYTE + near * _NEAR_BYTE
    if plan.block > 1 and plan.depth * plan.columns * element > _SPILLS * machine.l1_bytes:
        time += steps * plan.columns * element * _SPILLED_BYTE
    time += (-(-work.depth // plan.depth) - 1) * result / cores * _SUM_BYTE
    shares = work.batch * (blocks if plan.rows_first else 1)
    if machine.distance(left // shares) > 1:
        time += left * panels / cores * _LEFT_BYTE
    time += (left / min(shares, cores) - left / cores) * _FOREIGN_BYTE
    if not plan.rows_first and panels > 1 and result > machine.l2_bytes:
        time += result / cores * _RESULT_BYTE
    return time + forks * _FORK


def longest_sum(depth: int) -> int:
    """Return over how many elements one sum may be, where there are so many to add up.

    With blocks as long as there are blocks, errors are least; twice that costs fewer of them, and
    is what strict accuracy asks for.
    """
    if not choice.is_strict():
        return _LONGEST_SUM
    return max(2 * isqrt(depth), _SHORTEST_STRICT_SUM)


def split_evenly(length: int, longest: int) -> int:
    """Return how long the blocks of something are to be, up to a limit.

    All alike where that is not much shorter than the limit, else the last one is shorter.
    """
    if length <= longest:
        return length
    least = max(longest // _EVEN, 1)
    alike = (size for size in range(longest, least, -1) if length % size == 0)
    return next(alike, -(-length // -(-length // longest)))
