"""How a Winograd convolution is cut, and an estimate of how long it takes.

Tiles of 2×2 and 4×4 results transform rows and columns. Those of one row transform it alone, and
the rows of the filter stay in the reduction:

- 1×2, of a single small image. They save a third of the products instead of five ninths, but have
  a third more weights than the filter instead of seven ninths. Where an image is so small that a
  convolution waits for its weights, that counts.
- 1×4, of an image of up to four channels, which lies in planes. Vectors are of tiles, not of
  channels, and the reduction is as long as the filter is high, so that sums are worth their
  transform: 7×7 filters at stride 2 need 13 products where they had 28.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tvmify.compiler import sizes
from tvmify.compiler.costs import CORE, WINOGRAD
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.kernels.conv.winograd.cook_toom import Filtering
from tvmify.compiler.microarchitecture import Microarchitecture

if TYPE_CHECKING:
    from typing_extensions import Self

#: Input channels that are added up before the sum joins that of the others: errors grow with the
#: length of a sum, and those of F4 are at the limit. In float32 against float64, with 512 channels,
#: those of F4 are 1.0e-6 of the largest output in such blocks, and 3.3e-6 in one sum.
_BLOCK = 64


@dataclass(frozen=True)
class Chunks:
    """How loops over results are cut into chunks of tiles; see `Cut`."""

    height: int
    width: int
    down: int
    across: int
    shared: bool
    lanes: int


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
        Elements in one register.
    planar
        Whether the image is NCHW, of few channels; `image` is its NHWC shape all the same.
    """

    image: tuple[Any, ...]
    out: tuple[Any, ...]
    window: Window
    height: int
    width: int
    down: int
    across: int
    shared: bool
    tile: tiles.Tile
    lanes: int
    planar: bool

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
        planar: bool = False,
        of_any_batch: bool = False,
    ) -> Self:
        """Choose chunks and tile."""
        tall, columns = -(-out[1] // height), -(-out[2] // width)
        rows = out[0] * tall
        lanes = machine.lanes()
        points = _points(window, height, width)
        if planar:
            across = columns
            line = points * image[3] * across * 4  # bytes of inputs, for each row of the image
            seen = machine.working_set // line - window.size[0]
            most = max(1, min(rows // WINOGRAD.few_bands, seen // window.strides[0] + 1))
            down = max(n for n in range(1, most + 1) if out[1] % n == 0)
            ranked = tiles.ranked(across, out[3], machine)
            whole = (tile for tile in ranked[: WINOGRAD.near_best] if across % tile.rows == 0)
            tile = next(whole, ranked[0])
        elif shared:
            tile_bytes = points * 4 * lanes * 4
            room = max(1, machine.l2_bytes // tile_bytes)
            across = _even(columns, room)
            most = max(1, room // across)
            down = _whole(tall, most) if of_any_batch else _even(rows, most)
            tile = _tile(down * across, out[3], machine, narrow=False)
        else:
            # Inputs, and sums for two registers of channels.
            tile_bytes = points * (image[3] + 2 * lanes) * 4
            room = max(1, machine.l2_bytes // tile_bytes)
            across = _even(columns, room)
            most = max(1, min(room // across, rows * -(-columns // across) // WINOGRAD.few_chunks))
            down = _whole(tall, most) if of_any_batch else _even(rows, most)
            tile = _tile(down * across, out[3], machine, narrow=True)
        size = height, width, down, across
        return cls(tuple(image), tuple(out), window, *size, shared, tile, lanes, planar)

    def __str__(self) -> str:
        results = f"{self.height}x" * (self.height != self.width) + f"{self.width}"
        return f"winograd F{results}" + " shared" * self.shared

    @property
    def vertical(self) -> Filtering:
        """The transforms of columns, where there are any."""
        return Filtering(self.height, self.window.size[0], self.window.strides[0])

    @property
    def horizontal(self) -> Filtering:
        """The transforms of rows."""
        return Filtering(self.width, self.window.size[1], self.window.strides[1])

    @property
    def points(self) -> int:
        """Points of the transforms."""
        return _points(self.window, self.height, self.width)

    @property
    def taps(self) -> int:
        """Rows of the filter in the reduction."""
        return self.window.size[0] if self.height == 1 else 1

    @property
    def tall(self) -> int:
        """Rows of tiles of one image."""
        return -(-self.out[1] // self.height)

    @property
    def grid(self) -> tuple[Any, int]:
        """Rows of tiles, of all images, and tiles in a row."""
        return self.out[0] * self.tall, -(-self.out[2] // self.width)

    @property
    def chunks(self) -> tuple[Any, int]:
        """Chunks in both directions; if the number of images is symbolic, whole chunks of each
        image.
        """
        rows, columns = self.grid
        if sizes.is_static(rows):
            high = -(-rows // self.down)
        else:
            high = self.out[0] * (self.tall // self.down)
        return high, -(-columns // self.across)

    @property
    def in_row(self) -> int:
        """How often the tiles of one row fill the registers."""
        return -(-self.across // self.tile.rows)

    @property
    def groups(self) -> int:
        """How often the tiles of a chunk fill the registers; of an NCHW image, row by row."""
        if self.planar:
            return self.down * self.in_row
        return -(-self.down * self.across // self.tile.rows)

    @property
    def blocks(self) -> int:
        """Blocks of input channels."""
        return -(-self.image[3] // _BLOCK)

    @property
    def pieces(self) -> int:
        """Blocks of the reduction."""
        return 1 if self.planar else self.taps * self.blocks

    @property
    def depth(self) -> int:
        """Length of such a block: whole registers of input channels; for planes, the whole
        reduction.
        """
        if self.planar:
            return self.taps * self.image[3]
        even = -(-self.image[3] // self.blocks)
        return -(-even // self.lanes) * self.lanes

    @property
    def channels(self) -> int:
        """Input channels, with those that fill the last block."""
        return self.pieces * self.depth // self.taps

    @property
    def stretches(self) -> tuple[int, int]:
        """How many pieces of the image are transformed for a chunk.

        By rows and tiles; of an NCHW image by channels of rows and tiles, as whole registers.
        """
        if self.taps == 1:
            return self.down, self.across
        rows = self.vertical.reach + (self.down - 1) * self.window.strides[0]
        if not self.planar:
            return rows, self.across
        across = self.in_row * self.tile.rows
        return rows * self.image[3], -(-across // self.lanes) * self.lanes

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes."""
        chunks = prod(self.chunks)
        panels = -(-self.out[3] // self.tile.columns)
        outputs = panels * self.tile.columns
        weights = self.points * self.pieces * self.depth * outputs
        inputs = chunks * prod(self.stretches)
        if self.planar:  # each pixel is also padded and gathered
            inputs *= self.points + self.width * self.window.strides[1]
        else:
            inputs *= self.points * self.channels
        results = chunks * self.points * self.down * self.across * outputs
        if self.shared:
            nearby = max(WINOGRAD.nearby, WINOGRAD.nearby_l2 * machine.l2_bytes)
            is_near = inputs * 4 <= nearby
            read = WINOGRAD.nearby_read_byte if is_near else WINOGRAD.read_byte
            moved = inputs * 4 * (WINOGRAD.stored_byte + read * panels)
        elif self.planar:
            divides = self.across % self.tile.rows == 0
            moved = results * 4 * (WINOGRAD.sum_byte if divides else WINOGRAD.far_sum_byte)
        else:
            again = 0 if machine.keeps(weights * 4 / 2) else WINOGRAD.again_byte
            moved = weights * 4 * (chunks - 1) * again / self.groups
        multiply_adds = chunks * self.groups * self.tile.rows * weights
        products = machine.nanoseconds(WINOGRAD.product * multiply_adds)
        transforms = machine.nanoseconds(WINOGRAD.input * inputs + WINOGRAD.result * results)
        start = WINOGRAD.margin + WINOGRAD.shared_margin * CORE.fork * self.shared
        return start + max(products, weights * 4 * WINOGRAD.weight_byte) + transforms + moved


def _points(window: Window, height: int, width: int) -> int:
    """Points of the transforms of a tile."""
    across = Filtering(width, window.size[1], window.strides[1]).points
    if height == 1:
        return across
    return Filtering(height, window.size[0], window.strides[0]).points * across


def _whole(count: int, most: int) -> int:
    """The greatest length of at most `most` that divides `count`."""
    return max(length for length in range(1, min(count, most) + 1) if count % length == 0)


def _even(count: int, most: int) -> int:
    """The length of pieces of at most `most`: equal ones, if these are longer than half of it."""
    most = min(count, most)
    whole = _whole(count, most)
    return whole if 2 * whole > most else -(-count // -(-count // most))


def _tile(rows: int, columns: int, machine: Microarchitecture, narrow: bool) -> tiles.Tile:
    """As `tiles.choose`; the narrowest of the fast ones, or that which reads inputs least."""
    lanes = machine.lanes()

    def cost(tile: tiles.Tile) -> tuple[float, float]:
        panels = -(-columns // tile.columns)
        if not narrow:  # threads share them: with an odd number, one of two cores would wait
            panels += panels % 2
        count = -(-rows // tile.rows) * panels
        loaded = count * (tile.rows + tile.columns // lanes)
        equal = (tile.columns if narrow else 0, loaded)
        cycles = tiles.cycles(tile, machine, 32, columns) + WINOGRAD.far_row * tile.rows
        return count * cycles, equal

    return min((t for t in tiles.candidates(machine, 32, columns) if t.rows <= rows), key=cost)
