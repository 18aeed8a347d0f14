"""Winograd convolution: 3×3 filters at stride 1, in tiles of 2×2, 4×4 or 1×2 results.

A tile that has seen a NaN or an infinity holds no number in any of its results, in eager only the
pixels that see it do. So a tile whose results are not all finite is computed again, directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler.schedule import cook_toom
from tvmify.compiler.schedule.legalizing import or_zero
from tvmify.compiler.schedule.microarchitecture import Microarchitecture
from tvmify.compiler.schedule.windows import Window, pad
from tvmify.compiler.schedule.winograd_cut import Cut

#: Names of the template's blocks: the padded image; inputs transformed down and across; sums of
#: products of some input channels, and of all; results transformed down and across; their sum,
#: whether it is no number; the same results computed directly; the store.
PAD, DOWN, DATA = "winograd_pad", "winograd_down", "winograd_data"
ANCHOR, SUMS = "winograd_tile", "winograd_sums"
UP, RESULT = "winograd_up", "winograd_result"
CHECK, SPOILT, EXACT = "winograd_check", "winograd_spoilt", "winograd_exact"
STORE = "winograd_store"
PACK_DOWN, PACK = "winograd_pack_down", "winograd_pack"
#: Annotation of the anchor: how the rule is to cut the loops.
PLAN = "tvmify.winograd"
_DTYPE = "float32"
_LARGEST = float(np.finfo(_DTYPE).max)


def candidates(
    image: Sequence[int],
    out: Sequence[int],
    window: Window,
    groups: int,
    dtype: str,
    machine: Microarchitecture,
) -> list[Winograd]:
    """Return the kernels there are for a convolution."""
    plain = window.size == (3, 3) and window.strides == window.dilation == (1, 1)
    wide = min(image[3], out[3]) >= machine.lanes()
    if not (plain and wide and groups == 1 and dtype == _DTYPE):
        return []
    # Of several images there are rows enough to read weights for.
    sizes = [(2, 2), (4, 4), *[(1, 2)] * (out[0] == 1)]
    return [
        Winograd.of(image, out, window, *size, shared, machine)
        for size in sizes
        for shared in (False, True)
    ]


class Winograd(Cut):
    """The kernel, and what makes its arguments of the weights."""

    hint = "conv2d_winograd"

    @property
    def packs(self) -> tuple[Callable[[te.Tensor], te.Tensor], ...]:
        """What makes the kernel's arguments of the weights."""
        return self.pack, self.pack_exact

    def pack(self, kernel: te.Tensor) -> te.Tensor:
        """Transform OHWI weights into ``[tile of channels, point, input, channel of the tile]``.

        In double precision: the rounding of weights would count as much as that of all sums.
        """
        matrix, width, points = (
            cook_toom.transforms(self.width).filter,
            self.tile.columns,
            self.columns,
        )
        outputs, inputs = self.out[3], self.image[3]
        count, channels = -(-outputs // width), self.channels
        shape = (count, self.points, self.taps * channels, width)

        def weight(o: Expr, y: Expr, x: Expr, i: Expr) -> Expr:
            value = kernel[o, y, x, i].astype("float64")
            return or_zero(value, (o, outputs, width), (i, inputs, channels))

        def along(t: Expr, p: Expr, k: Expr, lane: Expr) -> Expr:
            output, y, i = t * width + lane, k // channels, k % channels
            whole = cook_toom.row(matrix, p, lambda x: weight(output, y, x, i), "float64")
            return whole.astype(_DTYPE)

        if self.taps > 1:
            return te.compute(shape, along, name=PACK)

        def down(t: Expr, i: Expr, p: Expr, x: Expr, lane: Expr) -> Expr:
            return cook_toom.row(matrix, p, lambda y: weight(t * width + lane, y, x, i), "float64")

        half = te.compute((count, channels, points, 3, width), down, name=PACK_DOWN)

        def across(t: Expr, p: Expr, i: Expr, lane: Expr) -> Expr:
            whole = cook_toom.row(
                matrix, p % points, lambda x: half[t, i, p // points, x, lane], "float64"
            )
            return whole.astype(_DTYPE)

        return te.compute(shape, across, name=PACK)

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
        height, width, rows = self.height, self.width, self.grid[0]
        tall = rows // self.out[0]
        high = self.chunks[0] * self.down if self.taps > 1 else tall * height
        pixels = (high, self.chunks[1] * self.across * width)
        padded = pad(image, self.window, pixels, PAD, channels=self.channels)

        def pixel(place: Sequence[Expr], y: Expr, x: Expr, channel: Expr) -> Expr:
            """What a tile, by chunk and place in the chunk, sees at its own pixel."""
            fy, fx, down, across = place
            row, column = fy * self.down + down, fx * self.across + across
            if self.taps > 1:  # a single image, with the rows of whole chunks
                return padded[0, row + y, column * width + x, channel]
            if rows % self.down:  # rows of the last chunk that are not there: the last one again
                row = tirx.min(row, rows - 1)
            return padded[row // tall, row % tall * height + y, column * width + x, channel]

        result = self._results(self._sums(self._data(pixel), packed))
        spoilt = self._spoilt(result)
        outputs, lanes = int(packed.shape[0]), self.tile.columns
        ry, rx = te.reduce_axis((0, 3), "ry"), te.reduce_axis((0, 3), "rx")
        rc = te.reduce_axis((0, self.image[3]), "rc")
        direct = te.compute(
            (*self.chunks, outputs, self.down, self.across, height, width, lanes),
            lambda fy, fx, t, dy, dx, y, x, lane: te.sum(
                pixel((fy, fx, dy, dx), y + ry, x + rx, rc) * exact[t, ry, rx, rc, lane],
                axis=[ry, rx, rc],
            ),
            name=EXACT,
        )

        def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
            row, column, lane = b * tall + y // height, x // width, c % lanes
            chunk = (row // self.down, column // self.across)
            tile = (*chunk, c // lanes, row % self.down, column % self.across)
            place = (*tile, y % height, x % width, lane)
            flag = spoilt(*tile, lane // self.lanes)
            return tirx.Select(flag == 0, result(*place), direct(*place))

        return te.compute(self.out, store, name=STORE)

    def _data(self, pixel: Callable[..., Expr]) -> te.Tensor:
        """Inputs of every tile, transformed: ``[chunk, group, point, tile, channel]``.

        With tiles of one row ``[chunk, point, stretch, channel]``, a stretch being what a tile sees
        of one row of the image: three of them, a row apart, are what it is computed from.
        """
        matrix, points, group = cook_toom.transforms(self.width).data, self.columns, self.tile.rows

        def along(fy: Expr, fx: Expr, p: Expr, number: Expr, c: Expr) -> Expr:
            place = (fy, fx, number // self.across, number % self.across)
            return cook_toom.row(matrix, p, lambda x: pixel(place, 0, x, c))

        if self.taps > 1:
            shape = (*self.chunks, points, self.stretches, self.channels)
            return te.compute(shape, along, name=DATA)

        def down(fy: Expr, fx: Expr, g: Expr, r: Expr, p: Expr, x: Expr, c: Expr) -> Expr:
            number = self._number(g, r)
            place = (fy, fx, number // self.across, number % self.across)
            return cook_toom.row(matrix, p, lambda y: pixel(place, y, x, c))

        shape = (*self.chunks, self.groups, group, points, points, self.channels)
        half = te.compute(shape, down, name=DOWN)
        return te.compute(
            (*self.chunks, self.groups, points**2, group, self.channels),
            lambda fy, fx, g, p, r, c: cook_toom.row(
                matrix, p % points, lambda x: half[fy, fx, g, r, p // points, x, c]
            ),
            name=DATA,
        )

    def _number(self, group: Expr, tile: Expr) -> Expr:
        """Number the tiles of a chunk through; of those that are not there, the last one again."""
        number, last = group * self.tile.rows + tile, self.down * self.across - 1
        return tirx.min(number, last) if (last + 1) % self.tile.rows else number

    def _sums(self, data: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """Sums of products: ``[chunk, tile of channels, point, group, tile, channel]``."""
        outputs, depth, lanes = int(packed.shape[0]), self.depth, self.tile.columns
        blocks, within = self.taps * self.blocks, (self.groups, self.tile.rows)
        size = self.height, self.width, self.down, self.across
        k = te.reduce_axis((0, depth), "k")

        def product(*i: Expr) -> Expr:
            fy, fx, t, p, o, g, r, lane = i
            weight = packed[t, p, o * depth + k, lane]
            if self.taps == 1:
                return data[fy, fx, g, p, r, o * depth + k] * weight
            stretch = self._number(g, r) + o // self.blocks * self.across
            return data[fy, fx, p, stretch, o % self.blocks * depth + k] * weight

        partial = te.compute(
            (*self.chunks, outputs, self.points, blocks, *within, lanes),
            lambda *i: te.sum(product(*i), axis=k),
            name=ANCHOR,
            attrs={PLAN: [*size, int(self.shared), self.lanes]},
        )
        o = te.reduce_axis((0, blocks), "o")

        def whole(fy: Expr, fx: Expr, t: Expr, p: Expr, g: Expr, r: Expr, lane: Expr) -> Expr:
            if blocks == 1:
                return partial[fy, fx, t, p, 0, g, r, lane]
            return te.sum(partial[fy, fx, t, p, o, g, r, lane], axis=o)

        return te.compute((*self.chunks, outputs, self.points, *within, lanes), whole, name=SUMS)

    def _results(self, sums: te.Tensor) -> te.Tensor:
        """Sums transformed back: ``[chunk, tile of channels, row, column, y, x, channel]``."""
        matrix, columns = cook_toom.transforms(self.width).result, self.columns
        shape = (*self.chunks, int(sums.shape[2]), self.down, self.across)
        lanes, group = self.tile.columns, self.tile.rows

        def product(
            fy: Expr, fx: Expr, t: Expr, dy: Expr, dx: Expr, p: Expr, q: Expr, lane: Expr
        ) -> Expr:
            number = dy * self.across + dx
            return sums(fy, fx, t, p * columns + q, number // group, number % group, lane)

        def down(*i: Expr) -> Expr:
            *place, y, q, lane = i
            return cook_toom.row(matrix, y, lambda p: product(*place, p, q, lane), pairs=True)

        half = product
        if self.taps == 1:
            half = te.compute((*shape, self.height, columns, lanes), down, name=UP)
        return te.compute(
            (*shape, self.height, self.width, lanes),
            lambda *i: cook_toom.row(matrix, i[-2], lambda q: half(*i[:-2], q, i[-1]), pairs=True),
            name=RESULT,
        )

    def _spoilt(self, result: te.Tensor) -> te.Tensor:
        """For each tile, and register of channels, whether a result is not finite."""
        *shape, height, width, lanes = (int(size) for size in result.shape)
        total = te.compute(
            (*shape, lanes),
            lambda *i: _tree(
                [result(*i[:-1], y, x, i[-1]) for y in range(height) for x in range(width)]
            ),
            name=CHECK,
        )

        def flag(*i: Expr) -> Expr:
            lane = i[-1] * self.lanes
            size = tirx.abs(_tree([total(*i[:-1], lane + k) for k in range(self.lanes)]))
            no, yes = tirx.const(0, "int32"), tirx.const(1, "int32")
            return tirx.Select(size <= tirx.const(_LARGEST, _DTYPE), no, yes)

        return te.compute((*shape, lanes // self.lanes), flag, name=SPOILT)


def _tree(terms: list[Expr]) -> Expr:
    """The sum of 2, 4, 8 … terms, by halves: one after the other they would wait."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
