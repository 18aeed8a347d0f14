"""How a matrix product is cut: register tile, block of the reduction, rows that stay together."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.schedule import choice, tiles
from tvmify.compiler.schedule.microarchitecture import Microarchitecture

#: One sum over more elements than this is less exact than the accuracy policy wants, and with
#: ``accuracy="strict"`` one over more than the other. A block below the least is not worth its
#: loads and stores.
_LONGEST_SUM, _LONGEST_STRICT_SUM, _SHORTEST_SUM = 1024, 96, 48


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


def choose(
    rows: int, columns: int, depth: int, machine: Microarchitecture, bits: int, workload: str
) -> Plan:
    """Choose a plan; the alternatives are there for measurements."""
    return choice.choose(workload, candidates(rows, columns, depth, machine, bits))


def candidates(
    rows: int, columns: int, depth: int, machine: Microarchitecture, bits: int
) -> list[Plan]:
    """Return the plans worth trying, the heuristic's own first."""
    found: list[Plan] = []
    for tile in tiles.ranked(rows, columns, machine, bits)[:3]:
        for plan in _plans(tile, rows, columns, depth, machine, bits):
            if plan not in found:
                found.append(plan)
    return found


def _plans(
    tile: tiles.Tile, rows: int, columns: int, depth: int, machine: Microarchitecture, bits: int
) -> list[Plan]:
    size = bits // 8
    row_tiles = -(-rows // tile.rows)
    # A block of the panel and the rows that it meets share the nearest cache.
    fitting = machine.l1_bytes * 5 // 4 // (tile.columns * size)
    longest = _LONGEST_STRICT_SUM if choice.is_strict() else _LONGEST_SUM
    depths = [split_evenly(depth, min(limit, longest)) for limit in (fitting, 2 * fitting)]
    if row_tiles == 1:
        depths = [split_evenly(depth, longest)]
    elif depth <= longest:
        depths.append(depth)
    return [Plan(tile.rows, tile.columns, d, row_tiles, False) for d in depths]


def split_evenly(length: int, longest: int) -> int:
    """Return the largest divisor of a length up to a limit; the length if only tiny ones are."""
    if length <= longest:
        return length
    for divisor in range(longest, _SHORTEST_SUM - 1, -1):
        if length % divisor == 0:
            return divisor
    return length
