"""Winograd convolution: 3×3 filters at stride 1, in tiles of 2×2 or 4×4 results.

A tile that has seen a NaN or an infinity holds no number in any of its results, in eager only the
pixels that see it do. So a tile whose results are not all finite is computed again, directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler.schedule import cook_toom, tiles
from tvmify.compiler.schedule.legalizing import or_zero
from tvmify.compiler.schedule.microarchitecture import Microarchitecture
from tvmify.compiler.schedule.windows import Window, pad

#: Names of the template's blocks: the padded image; inputs transformed down and across; sums of
#: products of some input channels, and of all; results transformed down and across; their sum,
#: whether it is no number; the same results computed directly; the store.
PAD, DOWN, DATA = "winograd_pad", "winograd_down", "winograd_data"
ANCHOR, SUMS = "winograd_tile", "winograd_sums"
UP, RESULT = "winograd_up", "winograd_result"
CHECK, SPOILT, EXACT = "winograd_check", "winograd_spoilt", "winograd_exact"
STORE = "winograd_store"
PACK_DOWN, PACK = "winograd_pack_down", "winograd_pack"
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
#: Annotation of the anchor: how the rule is to cut the loops.
PLAN = "tvmify.winograd"
_DTYPE = "float32"
_LARGEST = float(np.finfo(_DTYPE).max)


def fits(window: Window, groups: int, dtype: str) -> bool:
    """Whether there is a Winograd kernel for a convolution."""
    plain = window.size == (3, 3) and window.strides == window.dilation == (1, 1)
    return plain and groups == 1 and dtype == _DTYPE


@dataclass(frozen=True)
class Winograd:
    """One convolution, cut into tiles of `results` × `results` pixels.

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
    results: int
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
        results: int,
        shared: bool,
        machine: Microarchitecture,
    ) -> Winograd:
        """Choose chunks and tile."""
        rows, columns = out[0] * -(-out[1] // results), -(-out[2] // results)
        lanes = machine.lanes()
        if shared:
            tile_bytes = (results + 2) ** 2 * 4 * lanes * 4
            room = max(1, machine.l2_bytes // tile_bytes)
            across = _even(columns, room)
            down = _even(rows, max(1, room // across))
        else:
            # Inputs, and sums for two registers of channels.
            tile_bytes = (results + 2) ** 2 * (image[3] + 2 * lanes) * 4
            room = max(1, machine.l2_bytes // tile_bytes)
            across = _even(columns, room)
            most = max(1, min(room // across, rows * -(-columns // across) // _FEW_CHUNKS))
            down = _even(rows, most)
        tile = _tile(down * across, out[3], machine, narrow=not shared)
        return cls(tuple(image), tuple(out), window, results, down, across, shared, tile, lanes)

    def __str__(self) -> str:
        return f"winograd F{self.results}" + (" shared" if self.shared else "")

    hint = "conv2d_winograd"

    @property
    def packs(self) -> tuple[Callable[[te.Tensor], te.Tensor], ...]:
        """What makes the kernel's arguments of the weights."""
        return self.pack, self.pack_exact

    @property
    def points(self) -> int:
        """Points of the transforms, in one dimension."""
        return self.results + 2

    @property
    def grid(self) -> tuple[int, int]:
        """Rows of tiles, of all images, and tiles in a row."""
        return self.out[0] * -(-self.out[1] // self.results), -(-self.out[2] // self.results)

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks in both directions."""
        rows, columns = self.grid
        return -(-rows // self.down), -(-columns // self.across)

    @property
    def blocks(self) -> int:
        """Blocks of input channels."""
        return -(-self.image[3] // _BLOCK)

    @property
    def depth(self) -> int:
        """Input channels of one block, whole registers of them."""
        even = -(-self.image[3] // self.blocks)
        return -(-even // self.lanes) * self.lanes

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes."""
        chunks, in_chunk = prod(self.chunks), self.down * self.across
        inputs, squares = self.blocks * self.depth, self.points**2
        panels = -(-self.out[3] // self.tile.columns)
        outputs = panels * self.tile.columns
        whole = -(-in_chunk // self.tile.rows) * self.tile.rows
        products = chunks * whole * squares * inputs * outputs
        transforms = chunks * in_chunk * squares * (_INPUT * inputs + _RESULT * outputs)
        weights = squares * inputs * outputs * 4
        if self.shared:
            stored = chunks * in_chunk * squares * inputs * 4
            read = _READ / 2 if stored <= _NEARBY else _READ
            moved = stored * (_STORED + read * panels)
        else:
            moved = weights * (chunks - 1) * _AGAIN
        summing = max(machine.nanoseconds(_PRODUCT * products), weights * _WEIGHT)
        start = _START + _FORK * self.shared
        return start + summing + machine.nanoseconds(transforms) + moved

    def pack(self, kernel: te.Tensor) -> te.Tensor:
        """Transform OHWI weights into ``[tile of channels, point, input, channel of the tile]``.

        In double precision: the rounding of weights would count as much as that of all sums.
        """
        matrix, width, points = (
            cook_toom.transforms(self.results).filter,
            self.tile.columns,
            self.points,
        )
        count, depth = -(-self.out[3] // width), self.blocks * self.depth
        outputs, inputs = self.out[3], self.image[3]

        def weight(o: Expr, y: int, x: Expr, i: Expr) -> Expr:
            value = kernel[o, y, x, i].astype("float64")
            return or_zero(value, (o, outputs, width), (i, inputs, depth))

        def down(t: Expr, i: Expr, p: Expr, x: Expr, lane: Expr) -> Expr:
            return cook_toom.row(matrix, p, lambda y: weight(t * width + lane, y, x, i), "float64")

        half = te.compute((count, depth, points, 3, width), down, name=PACK_DOWN)

        def across(t: Expr, p: Expr, i: Expr, lane: Expr) -> Expr:
            whole = cook_toom.row(
                matrix, p % points, lambda x: half[t, i, p // points, x, lane], "float64"
            )
            return whole.astype(_DTYPE)

        return te.compute((count, points**2, depth, width), across, name=PACK)

    def pack_exact(self, kernel: te.Tensor) -> te.Tensor:
        """Lay OHWI weights out as ``[tile of channels, height, width, input, channel]``."""
        width, outputs = self.tile.columns, self.out[3]

        def weight(t: Expr, y: Expr, x: Expr, i: Expr, lane: Expr) -> Expr:
            output = t * width + lane
            return or_zero(kernel(output, y, x, i), (output, outputs, width))

        shape = (-(-outputs // width), 3, 3, self.image[3], width)
        return te.compute(shape, weight, name="winograd_pack_exact")

    def kernel(self, image: te.Tensor, packed: te.Tensor, exact: te.Tensor) -> te.Tensor:
        """The convolution of an image with weights in both packings."""
        m, rows = self.results, self.grid[0]
        tall = rows // self.out[0]
        pixels = (tall * m, self.chunks[1] * self.across * m)
        padded = pad(image, self.window, pixels, PAD, channels=self.blocks * self.depth)

        def pixel(place: Sequence[Expr], y: Expr, x: Expr, channel: Expr) -> Expr:
            """What a tile, by chunk and place in the chunk, sees at its own pixel."""
            fy, fx, down, across = place
            row, column = fy * self.down + down, fx * self.across + across
            if rows % self.down:  # rows of the last chunk that are not there: the last one again
                row = tirx.min(row, rows - 1)
            return padded[row // tall, row % tall * m + y, column * m + x, channel]

        result = self._results(self._sums(self._data(pixel), packed))
        spoilt = self._spoilt(result)
        outputs, lanes = int(packed.shape[0]), self.tile.columns
        ry, rx = te.reduce_axis((0, 3), "ry"), te.reduce_axis((0, 3), "rx")
        rc = te.reduce_axis((0, self.image[3]), "rc")
        direct = te.compute(
            (*self.chunks, outputs, self.down, self.across, m, m, lanes),
            lambda fy, fx, t, dy, dx, y, x, lane: te.sum(
                pixel((fy, fx, dy, dx), y + ry, x + rx, rc) * exact[t, ry, rx, rc, lane],
                axis=[ry, rx, rc],
            ),
            name=EXACT,
        )

        def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
            row, column, lane = b * tall + y // m, x // m, c % lanes
            chunk = (row // self.down, column // self.across)
            tile = (*chunk, c // lanes, row % self.down, column % self.across)
            place = (*tile, y % m, x % m, lane)
            flag = spoilt(*tile, lane // self.lanes)
            return tirx.Select(flag == 0, result(*place), direct(*place))

        return te.compute(self.out, store, name=STORE)

    def _data(self, pixel: Callable[..., Expr]) -> te.Tensor:
        """Inputs of every tile, transformed: ``[chunk, group, point, tile, channel]``."""
        matrix, points, group = cook_toom.transforms(self.results).data, self.points, self.tile.rows
        in_chunk, channels = self.down * self.across, self.blocks * self.depth
        groups = -(-in_chunk // group)

        def down(fy: Expr, fx: Expr, g: Expr, r: Expr, p: Expr, x: Expr, c: Expr) -> Expr:
            number = g * group + r
            if in_chunk % group:  # tiles of the last group that are not there: the last one again
                number = tirx.min(number, in_chunk - 1)
            place = (fy, fx, number // self.across, number % self.across)
            return cook_toom.row(matrix, p, lambda y: pixel(place, y, x, c))

        shape = (*self.chunks, groups, group, points, points, channels)
        half = te.compute(shape, down, name=DOWN)
        return te.compute(
            (*self.chunks, groups, points**2, group, channels),
            lambda fy, fx, g, p, r, c: cook_toom.row(
                matrix, p % points, lambda x: half[fy, fx, g, r, p // points, x, c]
            ),
            name=DATA,
        )

    def _sums(self, data: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """Sums of products: ``[chunk, tile of channels, point, group, tile, channel]``."""
        outputs, depth, lanes = int(packed.shape[0]), self.depth, self.tile.columns
        squares, within = self.points**2, (int(data.shape[2]), self.tile.rows)
        k = te.reduce_axis((0, depth), "k")
        partial = te.compute(
            (*self.chunks, outputs, squares, self.blocks, *within, lanes),
            lambda fy, fx, t, p, o, g, r, lane: te.sum(
                data[fy, fx, g, p, r, o * depth + k] * packed[t, p, o * depth + k, lane], axis=k
            ),
            name=ANCHOR,
            attrs={PLAN: [self.results, self.down, self.across, int(self.shared), self.lanes]},
        )
        o = te.reduce_axis((0, self.blocks), "o")

        def whole(fy: Expr, fx: Expr, t: Expr, p: Expr, g: Expr, r: Expr, lane: Expr) -> Expr:
            if self.blocks == 1:
                return partial[fy, fx, t, p, 0, g, r, lane]
            return te.sum(partial[fy, fx, t, p, o, g, r, lane], axis=o)

        return te.compute((*self.chunks, outputs, squares, *within, lanes), whole, name=SUMS)

    def _results(self, sums: te.Tensor) -> te.Tensor:
        """Sums transformed back: ``[chunk, tile of channels, row, column, y, x, channel]``."""
        matrix, m, points = cook_toom.transforms(self.results).result, self.results, self.points
        shape = (*self.chunks, int(sums.shape[2]), self.down, self.across)
        lanes, group = self.tile.columns, self.tile.rows

        def down(
            fy: Expr, fx: Expr, t: Expr, dy: Expr, dx: Expr, y: Expr, q: Expr, lane: Expr
        ) -> Expr:
            number = dy * self.across + dx
            at = (number // group, number % group, lane)
            return cook_toom.row(
                matrix, y, lambda p: sums(fy, fx, t, p * points + q, *at), pairs=True
            )

        half = te.compute((*shape, m, points, lanes), down, name=UP)
        return te.compute(
            (*shape, m, m, lanes),
            lambda *i: cook_toom.row(matrix, i[-2], lambda q: half(*i[:-2], q, i[-1]), pairs=True),
            name=RESULT,
        )

    def _spoilt(self, result: te.Tensor) -> te.Tensor:
        """For each tile, and register of channels, whether a result is not finite."""
        *shape, m, _, lanes = (int(size) for size in result.shape)
        total = te.compute(
            (*shape, lanes),
            lambda *i: _tree([result(*i[:-1], y, x, i[-1]) for y in range(m) for x in range(m)]),
            name=CHECK,
        )

        def flag(*i: Expr) -> Expr:
            lane = i[-1] * self.lanes
            size = tirx.abs(_tree([total(*i[:-1], lane + k) for k in range(self.lanes)]))
            no, yes = tirx.const(0, "int32"), tirx.const(1, "int32")
            return tirx.Select(size <= tirx.const(_LARGEST, _DTYPE), no, yes)

        return te.compute((*shape, lanes // self.lanes), flag, name=SPOILT)


def _even(count: int, most: int) -> int:
    """Length of equal pieces of at most so many; a little shorter if then no piece is cut."""
    most = min(count, most)
    whole = max(length for length in range(1, most + 1) if count % length == 0)
    return whole if 2 * whole > most else -(-count // -(-count // most))


def _tile(rows: int, columns: int, machine: Microarchitecture, narrow: bool) -> tiles.Tile:
    """As `tiles.choose`; the narrowest of the fast ones, or that which reads inputs least."""
    lanes = machine.lanes()

    def cost(tile: tiles.Tile) -> tuple[float, float]:
        count = -(-rows // tile.rows) * -(-columns // tile.columns)
        loaded = count * (tile.rows + tile.columns // lanes)
        equal = (tile.columns if narrow else 0, loaded)
        cycles = tiles.cycles(tile, machine, 32, columns) + _FAR_ROW * tile.rows
        return count * cycles, equal

    return min((t for t in tiles.candidates(machine, 32, columns) if t.rows <= rows), key=cost)


def _tree(terms: list[Expr]) -> Expr:
    """The sum of 2, 4, 8 … terms, by halves: one after the other they would wait."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
