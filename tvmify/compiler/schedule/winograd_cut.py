"""How a Winograd convolution is cut, and an estimate of how long it takes.

Tiles are of 2×2, 4×4 or 1×2 results. Those of one row transform columns alone; the rows of the
filter stay in the reduction. They save a third of the products instead of five ninths, but have a
third more weights than the filter instead of seven ninths. Where an image is so small that a
convolution waits for its weights, that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tvmify.compiler.schedule import tiles
from tvmify.compiler.schedule.microarchitecture import Microarchitecture
from tvmify.compiler.schedule.windows import Window

if TYPE_CHECKING:
    from typing_extensions import Self

#: Input channels that are added up before the sum joins that of the others: errors grow with the
#: length of a sum, and those of F4 are at the limit. In float32 against float64, with 512 channels,
#: those of F4 are 1.0e-6 of the largest output in such blocks, and 3.3e-6 in one sum.
_BLOCK = 64
#: What a multiply-add takes, and what transforming one input or one result takes, in those of the
#: direct kernel; nanoseconds per byte: of weights, unless the products take longer, which hide the
#: way from memory; of weights that the next chunk reads; of transformed inputs that go through
#: memory, and again for each tile of channels. Fitted, within 13 %, to the times of 77 kernels that
#: come near the fastest for their shape, by a script that was not kept, and mended since by the
#: times of 29 shapes with AVX-512 and with AVX2. The weight of weights is that of networks, in
#: which they come from memory: with 0.065, as kernels ask for whose weights a large third cache
#: keeps, ResNet-18 takes 7 % longer beside neighbours and as long without (AVX-512).
_PRODUCT, _INPUT, _RESULT = 1.05, 14, 6
_WEIGHT, _AGAIN, _STORED, _READ = 0.08, 0.021, 0.057, 0.05
#: So many bytes of transformed inputs stay in the second and third cache, and are read in half the
#: time.
_NEARBY = 1 << 20
#: And nanoseconds that have to be gained: the direct kernel is more exact, and has a single fork.
_START, _FORK = 50_000, 20_000
#: Cycles that a step takes for each row of a tile, beside those of other products: inputs come from
#: the second cache. Narrower tiles read them more often, and took 5 to 30 % longer (AVX-512).
_FAR_ROW = 0.125
#: Chunks with inputs of their own are made so small that there are this many.
_FEW_CHUNKS = 8


@dataclass(frozen=True)
class Cut:
    """One convolution, cut into tiles of `height` × `width` pixels, the former of which may be one.

    Attributes
    ----------
    down, across
        Rows and columns of tiles in a chunk. Rows run on through all images.
    shared
        Whether the inputs of all chunks are transformed before the first product.
    tile
        How many tiles and output channels are added up in registers.
    lanes
        Channels in one register.
    """

    image: tuple[int, ...]
    out: tuple[int, ...]
    window: Window
    height: int
    width: int
    down: int
    across: int
    shared: bool
    tile: tiles.Tile
    lanes: int

    @classmethod
    def of(
        cls,
        image: Sequence[int],
        out: Sequence[int],
        window: Window,
        height: int,
        width: int,
        shared: bool,
        machine: Microarchitecture,
    ) -> Self:
        """Choose chunks and tile."""
        rows, columns = out[0] * -(-out[1] // height), -(-out[2] // width)
        lanes = machine.lanes()
        points = _points(height, width)
        if shared:
            tile_bytes = points * 4 * lanes * 4
            room = max(1, machine.l2_bytes // tile_bytes)
            across = _even(columns, room)
            down = _even(rows, max(1, room // across))
        else:
            # Inputs, and sums for two registers of channels.
            tile_bytes = points * (image[3] + 2 * lanes) * 4
            room = max(1, machine.l2_bytes // tile_bytes)
            across = _even(columns, room)
            most = max(1, min(room // across, rows * -(-columns // across) // _FEW_CHUNKS))
            down = _even(rows, most)
        tile = _tile(down * across, out[3], machine, narrow=not shared)
        size = height, width, down, across
        return cls(tuple(image), tuple(out), window, *size, shared, tile, lanes)

    def __str__(self) -> str:
        results = f"{self.height}x" * (self.height != self.width) + f"{self.width}"
        return f"winograd F{results}" + " shared" * self.shared

    @property
    def points(self) -> int:
        """Points of the transforms."""
        return _points(self.height, self.width)

    @property
    def columns(self) -> int:
        """Points of the transforms of one row."""
        return self.width + 2

    @property
    def taps(self) -> int:
        """Rows of the filter in the reduction."""
        return 3 if self.height == 1 else 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows of tiles, of all images, and tiles in a row."""
        return self.out[0] * -(-self.out[1] // self.height), -(-self.out[2] // self.width)

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks in both directions."""
        rows, columns = self.grid
        return -(-rows // self.down), -(-columns // self.across)

    @property
    def groups(self) -> int:
        """How often the tiles of a chunk fill the registers."""
        return -(-self.down * self.across // self.tile.rows)

    @property
    def blocks(self) -> int:
        """Blocks of input channels."""
        return -(-self.image[3] // _BLOCK)

    @property
    def depth(self) -> int:
        """Input channels of one block, whole registers of them."""
        even = -(-self.image[3] // self.blocks)
        return -(-even // self.lanes) * self.lanes

    @property
    def channels(self) -> int:
        """Input channels, with those that fill the last block."""
        return self.blocks * self.depth

    @property
    def stretches(self) -> int:
        """How many pieces of the image are transformed for a chunk."""
        return (self.down + self.taps - 1) * self.across

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes."""
        chunks = prod(self.chunks)
        panels = -(-self.out[3] // self.tile.columns)
        outputs = panels * self.tile.columns
        weights = self.points * self.taps * self.channels * outputs
        inputs = chunks * self.points * self.stretches * self.channels
        results = chunks * self.points * self.down * self.across * outputs
        if self.shared:
            read = _READ / 2 if inputs * 4 <= _NEARBY else _READ
            moved = inputs * 4 * (_STORED + read * panels)
        else:
            moved = weights * 4 * (chunks - 1) * _AGAIN
        products = machine.nanoseconds(_PRODUCT * chunks * self.groups * self.tile.rows * weights)
        transforms = machine.nanoseconds(_INPUT * inputs + _RESULT * results)
        start = _START + _FORK * self.shared
        return start + max(products, weights * 4 * _WEIGHT) + transforms + moved


def _points(height: int, width: int) -> int:
    """Points of the transforms of a tile."""
    return (height + 2 if height > 1 else 1) * (width + 2)


def _even(count: int, most: int) -> int:
    """Length of equal pieces of at most so many; a little shorter if then no piece is cut."""
    most = min(count, most)
    whole = max(length for length in range(1, most + 1) if count % length == 0)
    return whole if 2 * whole > most else -(-count // -(-count // most))


def _tile(rows: int, columns: int, machine: Microarchitecture, narrow: bool) -> tiles.Tile:
    """As `tiles.choose`; the narrowest of the fast ones, or that which reads inputs least."""
    lanes = machine.lanes()

    def cost(tile: tiles.Tile) -> tuple[float, float]:
        panels = -(-columns // tile.columns)
        if not narrow:  # they are shared out: of an odd number, one core waits for the other
            panels += panels % 2
        count = -(-rows // tile.rows) * panels
        loaded = count * (tile.rows + tile.columns // lanes)
        equal = (tile.columns if narrow else 0, loaded)
        cycles = tiles.cycles(tile, machine, 32, columns) + _FAR_ROW * tile.rows
        return count * cycles, equal

    return min((t for t in tiles.candidates(machine, 32, columns) if t.rows <= rows), key=cost)
