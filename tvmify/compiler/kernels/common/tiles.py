"""Register tiles: the rows and columns of a product whose sums stay in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

from tvmify.compiler.costs import TILE
from tvmify.compiler.microarchitecture import Microarchitecture

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """Rows × columns of sums that stay in registers while the kernel runs along the reduction."""

    rows: int
    columns: int


def candidates(machine: Microarchitecture, bits: int, columns: int) -> list[Tile]:
    """All tiles whose sums, weights and one activation fit in the registers."""
    lanes = lanes_for(columns, machine, bits)
    return [
        Tile(rows, vectors * lanes)
        for vectors in range(1, TILE.most_vectors + 1)
        for rows in range(1, machine.accumulators + 1)
        if rows * vectors + (0 if machine.memory_operands else vectors) <= machine.accumulators
        # With every register in use LLVM spills: the weights of a step need registers as well.
        and (rows + 1) * vectors < machine.vector_registers
        and (vectors - 1) * lanes < columns
    ]


def lanes_for(columns: int, machine: Microarchitecture, bits: int) -> int:
    """Lanes of the vectors that a tile is made of: a whole register, unless columns are few."""
    lanes = machine.lanes(bits)
    while lanes > 1 and lanes // 2 >= columns:
        lanes //= 2
    return lanes


def leaves_register(tile: Tile, machine: Microarchitecture, bits: int, columns: int) -> bool:
    """Whether sums, the vectors of a step and what is broadcast leave a register.

    Where they leave none, LLVM spills in loops that are more than one step of a product
    (docs/measurements/registers.md). If a step has one vector, those of all steps are loaded at
    once, beside a second broadcast. A single row uses each vector once, straight from memory.
    """
    if tile.rows == 1 and machine.memory_operands:
        return True
    vectors = tile.columns // lanes_for(columns, machine, bits)
    loaded = vectors if vectors > 1 else TILE.most_steps + 1
    return tile.rows * vectors + loaded + 1 < machine.vector_registers


def steps(tile: Tile, machine: Microarchitecture, bits: int, *lengths: int) -> int:
    """Choose how many steps of the reduction one iteration takes: a divisor of all `lengths`."""
    if not leaves_register(tile, machine, bits, tile.columns):
        return 1
    multiply_adds = tile.rows * tile.columns // lanes_for(tile.columns, machine, bits)
    most = max(min(TILE.iteration // multiply_adds, TILE.most_steps), 1)
    return next(n for n in range(most, 0, -1) if not any(length % n for length in lengths))


def cycles(tile: Tile, machine: Microarchitecture, bits: int, columns: int) -> float:
    """Estimate the cycles that one step of the reduction takes on one tile.

    Loads hide behind multiply-adds only in part; a sum can be added to once per latency.
    """
    vectors = tile.columns // lanes_for(columns, machine, bits)
    arithmetic = tile.rows * vectors / machine.units
    around = TILE.per_vector * vectors + TILE.per_row * tile.rows
    one_by_one = 1.0 if leaves_register(tile, machine, bits, columns) else TILE.one_by_one
    return max((arithmetic + around) * one_by_one, TILE.latency)


def choose(rows: int, columns: int, machine: Microarchitecture, bits: int = 32) -> Tile:
    """Choose the tile for a product with these numbers of rows and columns."""
    return ranked(rows, columns, machine, bits)[0]


def ranked(rows: int, columns: int, machine: Microarchitecture, bits: int = 32) -> list[Tile]:
    """Rank the tiles for a product with these numbers of rows and columns, the best first. Whole
    tiles are counted, so that the waste of tails is included. Among equals the squarer tile is
    better, since it loads less.
    """

    def cost(tile: Tile) -> tuple[float, float]:
        count = -(-rows // tile.rows) * -(-columns // tile.columns)
        vectors = tile.columns / machine.lanes(bits)
        loaded = count * (tile.rows + vectors)
        return count * cycles(tile, machine, bits, columns), loaded

    within = (tile for tile in candidates(machine, bits, columns) if tile.rows <= rows)
    return sorted(within, key=cost)


def alternatives(ranked: Sequence[T], *features: Callable[[T], int]) -> list[T]:
    """Choose tiles that are worth measuring besides the best. The runners-up are much like it, so
    these are, for each feature, the best tiles with two other values of it.
    """
    found: list[T] = []
    for feature in features:
        by_value = {feature(tile): tile for tile in reversed(ranked)}
        order = dict.fromkeys(feature(tile) for tile in ranked)
        found += [by_value[value] for value in list(order)[1:3]]
    return list(dict.fromkeys(found))


class ImageTile(NamedTuple):
    """Rows and columns of pixels × channels of sums that stay in registers.

    If `flat`, pixels are numbered across rows, and a tile continues in the next row.
    """

    down: int
    across: int
    channels: int
    flat: bool = False

    @property
    def pixels(self) -> int:
        """How many there are."""
        return self.down * self.across

    @property
    def product(self) -> Tile:
        """The same registers as a tile of a matrix product."""
        return Tile(self.pixels, self.channels)

    def counts(self, height: int, width: int) -> tuple[int, int]:
        """How many tiles cover an image, vertically and horizontally."""
        if self.flat:
            height, width = 1, height * width
        return -(-height // self.down), -(-width // self.across)

    def __str__(self) -> str:
        return f"{self.down}x{self.across}x{self.channels}{' flat' * self.flat}"


def ranked_image(
    height: int, width: int, columns: int, machine: Microarchitecture, bits: int = 32
) -> list[ImageTile]:
    """Order the tiles for an image, the best first.

    As `ranked`; where whole tiles of channels are possible, others come last: LLVM spoils the
    stores of a tile that is cut on two sides. Of tiles with as many pixels the squarest comes
    first, the taller one of two: neighbours in a row share inputs, which LLVM loads early and once,
    and spills (docs/measurements/registers.md).
    """

    def cost(image_tile: ImageTile) -> tuple[float, ...]:
        down, across, channels, flat = image_tile
        tile = image_tile.product
        count = prod(image_tile.counts(height, width)) * -(-columns // channels)
        loaded = count * (tile.rows + channels / machine.lanes(bits))
        is_cut = columns > channels and columns % channels > 0
        pieces = TILE.cut if flat or height % down or width % across else 1.0
        taken = pieces * count * cycles(tile, machine, bits, columns)
        return is_cut, taken, flat, max(down, across), across, loaded

    products = candidates(machine, bits, columns)
    found = [
        ImageTile(down, tile.rows // down, tile.columns)
        for tile in products
        for down in range(1, min(height, tile.rows) + 1)
        if tile.rows % down == 0 and tile.rows // down <= width
    ]
    found += [
        ImageTile(1, tile.rows, tile.columns, flat=True)
        for tile in products
        if height > 1
        and width % tile.rows
        and tile.rows <= min(TILE.most_addresses, height * width)
    ]
    return sorted(found, key=cost)
