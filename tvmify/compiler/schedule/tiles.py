"""Register tiles: how many rows and columns of a product a kernel keeps in registers."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.schedule.microarchitecture import Microarchitecture

#: Cycles from a fused multiply-add to the next one that needs its sum, on all cores of interest.
_LATENCY = 4
#: Wider columns than this many registers do not pay: a tile needs rows as well.
_MOST_VECTORS = 4


@dataclass(frozen=True)
class Tile:
    """Rows × columns of sums that stay in registers while the kernel runs along the reduction."""

    rows: int
    columns: int


def candidates(machine: Microarchitecture, bits: int) -> list[Tile]:
    """Every tile whose sums, weights and one activation fit into the registers."""
    lanes = machine.lanes(bits)
    return [
        Tile(rows, vectors * lanes)
        for vectors in range(1, 2 * _MOST_VECTORS + 1)
        for rows in range(1, machine.accumulators + 1)
        if rows * vectors + (0 if machine.memory_operands else vectors) <= machine.accumulators
        and (vectors <= _MOST_VECTORS or rows == 1)
    ]


def cycles(tile: Tile, machine: Microarchitecture, bits: int) -> float:
    """Estimate the cycles that one step of the reduction takes on one tile.

    Two multiply-adds start per cycle, two operands are loaded per cycle, and a sum can be added
    to once per latency: whichever is slowest.
    """
    vectors = tile.columns // machine.lanes(bits)
    arithmetic = tile.rows * vectors / 2
    loads = (tile.rows + vectors) / 2
    return max(arithmetic, loads, _LATENCY)


def choose(rows: int, columns: int, machine: Microarchitecture, bits: int = 32) -> Tile:
    """Pick the tile for a product of so many rows and columns.

    The estimate counts whole tiles, so what a tail wastes is part of it; a fixed share per tile
    stands for filling and storing the registers.
    """

    def cost(tile: Tile) -> float:
        count = -(-rows // tile.rows) * -(-columns // tile.columns)
        return count * cycles(tile, machine, bits)

    narrow = [tile for tile in candidates(machine, bits) if tile.rows <= rows]
    # Among equals the squarer tile loads less from the caches.
    return min(narrow, key=lambda t: (cost(t), t.rows / t.columns * machine.lanes(bits) + 
                                      t.columns / machine.lanes(bits) / t.rows))
