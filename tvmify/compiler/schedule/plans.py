"""How a matrix product is cut: register tile, block of the reduction, rows that stay together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvmify.compiler.schedule import choice, tiles
from tvmify.compiler.schedule.microarchitecture import Microarchitecture

#: One sum over more elements than this is less exact than the accuracy policy wants, and with
#: ``accuracy="strict"`` one over more than the other. A block below the least is not worth its
#: loads and stores.
_LONGEST_SUM, LONGEST_STRICT_SUM, _SHORTEST_SUM = 1024, 96, 48
#: Fewer tasks than the first cannot be shared out evenly. Up to the second are made where that is
#: free: the right-hand side is small enough to be read again for each.
_FEW_TASKS, _MANY_TASKS = 8, 32
#: Sizes of one block of a panel, in sizes of the first cache. With the next block already on its
#: way, a little more than the cache holds is fastest: what is added up is stored less often.
_PANELS = (1.25, 0.625, 4)
#: Of how many register tiles the cost is estimated with all that surrounds them.
_TILES = 12


@dataclass(frozen=True)
class Plan:
    """One way to cut a product.

    Attributes
    ----------
    rows, columns
        The tile of sums that stays in registers.
    depth
        Elements of the reduction that are added up in registers; a multiple of them is the whole.
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
    """One matrix product, or `batch` of them, of activations with weights or with activations."""

    batch: int
    rows: int
    columns: int
    depth: int
    dtype: str
    packed: bool

    def __str__(self) -> str:
        kind = "packed matmul" if self.packed else "matmul"
        return f"{kind} {self.batch}x{self.rows}x{self.depth}x{self.columns} {self.dtype}"


def choose(work: Workload, machine: Microarchitecture, bits: int) -> Plan:
    """Choose a plan; the alternatives are there for measurements."""
    return choice.choose(str(work), candidates(work, machine, bits))


def candidates(work: Workload, machine: Microarchitecture, bits: int) -> list[Plan]:
    """Return the plans worth trying, the heuristic's own first."""
    ranked = tiles.ranked(work.rows, work.columns, machine, bits)
    order = _by_rows(work, ranked[0], machine, bits)

    def cost(tile: tiles.Tile) -> float:
        tasks, block = _tasks(work, tile, machine, bits, order)
        steps = tasks * block * tiles.cycles(tile, machine, bits, work.columns)
        return steps * _unevenness(tasks)

    ranked = sorted(ranked[:_TILES], key=cost) + ranked[_TILES:]
    best = ranked[0]
    own, *panels = (_plan(work, best, machine, bits, order, panel) for panel in _PANELS)
    others = tiles.alternatives(ranked, lambda tile: tile.columns, lambda tile: tile.rows)
    found = [
        own,
        *(_plan(work, tile, machine, bits, order, _PANELS[0]) for tile in others),
        *panels,
        _plan(work, best, machine, bits, not order, _PANELS[0]),
    ]
    # Twice as many tasks, or half.
    found += [replace(own, block=block) for block in (-(-own.block // 2), 2 * own.block)]
    row_tiles = -(-work.rows // best.rows)
    return [plan for plan in dict.fromkeys(found) if plan.block <= row_tiles]


def _by_rows(work: Workload, tile: tiles.Tile, machine: Microarchitecture, bits: int) -> bool:
    """Whether it moves fewer bytes to meet all columns with one block of rows at a time.

    The left-hand side is read again for each panel, or the right-hand side for each block of
    rows; from afar where it does not stay in the private caches.
    """
    left, right = (work.depth * size * bits // 8 for size in (work.rows, work.columns))
    panels = -(-work.columns // tile.columns)
    blocks = -(-left // (machine.l2_bytes // 2))
    by_columns = right + left * panels * machine.distance(left)
    by_rows = left + right * blocks * machine.distance(right)
    return work.packed and by_rows < by_columns


def _tasks(
    work: Workload, tile: tiles.Tile, machine: Microarchitecture, bits: int, by_rows: bool
) -> tuple[int, int]:
    """Return how many tasks there are, and how many tiles of rows belong to each.

    The rows of a task stay in the second cache if the columns change first. Otherwise all rows are
    one block, unless the panels are too few to be shared out among the cores.
    """
    row_tiles = -(-work.rows // tile.rows)
    panels = work.batch * -(-work.columns // tile.columns)
    size = bits // 8
    nearby_weights = machine.distance(work.columns * work.depth * size) == 1
    blocks = -(-(_MANY_TASKS if by_rows and nearby_weights else _FEW_TASKS) // panels)
    if by_rows:
        nearby = machine.l2_bytes // 2 // (tile.rows * work.depth * size)
        blocks = max(blocks, -(-row_tiles // max(nearby, 1)))
    blocks = min(
        range(min(blocks, row_tiles), min(2 * blocks, row_tiles) + 1),
        key=lambda n: n * -(-row_tiles // n) * _unevenness(n * panels),
    )
    return blocks * panels, -(-row_tiles // blocks)


def _unevenness(tasks: int) -> float:
    """What two, four or eight cores lose because the last one has fewer tasks than the others."""
    cores = (2, 4, 8)
    return sum(-(-tasks // n) * n / tasks for n in cores) / len(cores)


def _plan(
    work: Workload,
    tile: tiles.Tile,
    machine: Microarchitecture,
    bits: int,
    by_rows: bool,
    panel: float,
) -> Plan:
    _, block = _tasks(work, tile, machine, bits, by_rows)
    longest = LONGEST_STRICT_SUM if choice.is_strict() else _LONGEST_SUM
    if block > 1:  # the block of the panel is read again
        longest = min(longest, int(machine.l1_bytes * panel) // (tile.columns * bits // 8))
    depth = split_evenly(work.depth, longest)
    return Plan(tile.rows, tile.columns, depth, block, by_rows)


def split_evenly(length: int, longest: int) -> int:
    """Return the largest divisor of a length up to a limit; the length if only tiny ones are."""
    if length <= longest:
        return length
    for divisor in range(longest, _SHORTEST_SUM - 1, -1):
        if length % divisor == 0:
            return divisor
    return length
