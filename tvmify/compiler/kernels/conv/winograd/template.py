"""Winograd convolution, in tiles of 2×2, 4×4, 1×2 or 1×4 results.

A NaN or infinity in the input of a tile makes all of its results NaN, while in eager it affects
only the pixels whose window contains it. So a tile whose results are not all finite is recomputed
directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

import numpy as np
from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.axes import LANE, PIXEL, ROW, named
from tvmify.compiler.kernels.common.legalizing import or_zero
from tvmify.compiler.kernels.common.notes import noted
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.windows import NCHW, pad
from tvmify.compiler.kernels.conv.winograd.cook_toom import Filtering
from tvmify.compiler.kernels.conv.winograd.plan import Chunks, Cut
from tvmify.compiler.microarchitecture import Microarchitecture

#: Names of the template's blocks: the padded image; of planes, what tiles see at the same place,
#: brought together; inputs transformed down and across; sums of
#: products of some input channels, and of all; results transformed down and across; their sum,
#: whether it is NaN; the same results computed directly; the store.
PAD, SPLIT = "winograd_pad", "winograd_split"
DOWN, DATA = "winograd_down", "winograd_data"
ANCHOR, SUMS = "winograd_tile", "winograd_sums"
UP, RESULT = "winograd_up", "winograd_result"
CHECK, SPOILT, EXACT = "winograd_check", "winograd_spoilt", "winograd_exact"
STORE = "winograd_store"
PACK_DOWN, PACK = "winograd_pack_down", "winograd_pack"
#: The outer axes of the sums.
_PLACE = ("y_chunk", "x_chunk")
_CHUNK = (*_PLACE, "channel_tile", "point")
_DTYPE = "float32"
_LARGEST = float(np.finfo(_DTYPE).max)


def candidates(
    convolution: Convolution, machine: Microarchitecture, of_any_batch: bool = False
) -> list[Winograd]:
    """Return the Winograd kernels for a convolution.

    Parameters
    ----------
    of_any_batch
        Whether they should serve any number of images: then each chunk is of one image.
    """
    image, out, window = convolution.image, convolution.out, convolution.window
    (height, width), (stride, column_stride) = window.size, window.strides
    square = height == width and stride == column_stride and window.dilation == (1, 1)
    known = square and convolution.groups == 1 and convolution.dtype == _DTYPE
    if not known or out[3] < machine.lanes():
        return []
    if convolution.planar:
        if not Filtering(4, width, stride).saves:
            return []
        return [Winograd.of(image, out, window, 1, 4, False, machine, planar=True)]
    if width != 3 or stride > 2 or image[3] < machine.lanes():
        return []
    sizes = [(2, 2)]
    if stride == 1:
        # At stride 2 they save a fifth of the products of 2×2 and read three times the weights.
        sizes.append((4, 4))
        if (
            out[0] == 1 and not of_any_batch
        ):  # several images have enough rows for each read of the weights
            sizes.append((1, 2))
    return [
        Winograd.of(image, out, window, *size, shared, machine, of_any_batch=of_any_batch)
        for size in sizes
        for shared in (False, True)
    ]


class Winograd(Cut):
    """The kernel, and the functions that pack its weights."""

    hint = "conv2d_winograd"

    #: The names of the axes that number tiles, in each block of their results.
    place: ClassVar[tuple[str, ...]] = (*_PLACE, "channel_tile", "down", "across")

    @property
    def chunking(self) -> Chunks:
        """How the rule is to cut the loops over results."""
        return Chunks(self.height, self.width, self.down, self.across, self.shared, self.lanes)

    @property
    def packs(self) -> tuple[Callable[[te.Tensor], te.Tensor], ...]:
        """The functions that pack the weights."""
        return self.pack, self.pack_exact

    def pack(self, kernel: te.Tensor) -> te.Tensor:
        """Transform OHWI weights into ``[tile of channels, point, input, channel of the tile]``.

        In double precision: the rounding of weights would count as much as that of all sums.
        """
        width, outputs, inputs = self.tile.columns, self.out[3], self.image[3]
        down, across = self.vertical, self.horizontal
        count, channels = -(-outputs // width), self.channels
        shape = (count, self.points, self.taps * channels, width)

        def weight(o: Expr, y: Expr, x: Expr, i: Expr) -> Expr:
            value = kernel[o, y, x, i].astype("float64")
            return or_zero(value, (o, outputs, width), (i, inputs, channels))

        def by_rows(t: Expr, p: Expr, k: Expr, lane: Expr) -> Expr:
            output, y, i = t * width + lane, k // channels, k % channels
            whole = across.filter(p, lambda x: weight(output, y, x, i), "float64")
            return whole.astype(_DTYPE)

        axes = named("channel_tile", "point", "k", LANE)
        if self.taps > 1:
            return te.compute(shape, by_rows, name=PACK, attrs=axes)

        def half(t: Expr, i: Expr, p: Expr, x: Expr, lane: Expr) -> Expr:
            return down.filter(p, lambda y: weight(t * width + lane, y, x, i), "float64")

        size = (count, channels, down.points, across.taps, width)
        names = named("channel_tile", "input", "point", "window_x", LANE)
        columns = te.compute(size, half, name=PACK_DOWN, attrs=names)

        def whole(t: Expr, p: Expr, i: Expr, lane: Expr) -> Expr:
            row, column = p // across.points, p % across.points
            value = across.filter(column, lambda x: columns[t, i, row, x, lane], "float64")
            return value.astype(_DTYPE)

        return te.compute(shape, whole, name=PACK, attrs=axes)

    def pack_exact(self, kernel: te.Tensor) -> te.Tensor:
        """Lay OHWI weights out as ``[tile of channels, height, width, input, channel]``."""
        width, outputs = self.tile.columns, self.out[3]

        def weight(t: Expr, y: Expr, x: Expr, i: Expr, lane: Expr) -> Expr:
            output = t * width + lane
            return or_zero(kernel(output, y, x, i), (output, outputs, width))

        shape = (-(-outputs // width), *self.window.size, self.image[3], width)
        axes = named("channel_tile", "window_y", "window_x", "input", LANE)
        return te.compute(shape, weight, name="winograd_pack_exact", attrs=axes)

    def kernel(self, image: te.Tensor, packed: te.Tensor, exact: te.Tensor) -> te.Tensor:
        """The convolution of an image with weights in both packings."""
        if not sizes.is_static(self.out[0]):  # each function has its own symbols
            given = tuple((image.shape[0], *shape[1:]) for shape in (self.image, self.out))
            return replace(self, image=given[0], out=given[1])._kernel(image, packed, exact)
        return self._kernel(image, packed, exact)

    def _kernel(self, image: te.Tensor, packed: te.Tensor, exact: te.Tensor) -> te.Tensor:
        height, width, tall = self.height, self.width, self.tall
        # Of planes whole vectors of tiles, which see a little of the next.
        columns = self.stretches[1] + 1 if self.planar else self.chunks[1] * self.across
        size = (self._padded_tall * height, columns * width)
        padded = pad(image, self.window, size, PAD, channels=self.channels, planar=self.planar)
        pixel = self._pixel(padded)
        data = self._planes(padded) if self.planar else self._data(pixel)
        result = self._results(self._sums(data, packed))
        spoilt = self._spoilt(result)
        direct = self._direct(pixel, exact, outputs=int(packed.shape[0]))
        lanes = self.tile.columns

        def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
            row, column, lane = b * tall + y // height, x // width, c % lanes
            chunk = (row // self.down, column // self.across)
            tile = (*chunk, c // lanes, row % self.down, column % self.across)
            place = (*tile, y % height, x % width, lane)
            flag = spoilt(*tile, lane // self.lanes)
            return tirx.Select(flag == 0, result(*place), direct(*place))

        return te.compute(self.out, store, name=STORE, attrs=named(*PIXEL))

    @property
    def _padded_tall(self) -> Expr:
        """Rows of tiles in a padded image: whole chunks if the reduction has rows of the filter."""
        return -(-self.tall // self.down) * self.down if self.taps > 1 else self.tall

    def _pixel(self, padded: te.Tensor) -> Callable[..., Expr]:
        """Return the function for elements of padded images."""
        width, rows, tall = self.width, self.grid[0], self.tall
        row_stride, column_stride = self.window.strides

        def pixel(place: Sequence[Expr], y: Expr, x: Expr, channel: Expr) -> Expr:
            """The element at (y, x) of the input of a tile, in one channel."""
            fy, fx, down, across = place
            first = fy * self.down
            column = (fx * self.across + across) * width * column_stride
            if self.taps > 1:  # chunks are of one image
                b, row = first // tall, first % tall + down
            else:
                row = first + down
                if sizes.is_static(rows) and rows % self.down:  # past the last row, read it again
                    row = tirx.min(row, rows - 1)
                b, row = row // tall, row % tall
            index = (b, row * self.height * row_stride + y, column + x, channel)
            return padded[tuple(index[axis] for axis in NCHW) if self.planar else index]

        return pixel

    def _direct(self, pixel: Callable[..., Expr], exact: te.Tensor, outputs: int) -> te.Tensor:
        """Results by the definition of a convolution, for tiles that came out not finite."""
        row_stride, column_stride = self.window.strides
        ry = te.reduce_axis((0, self.window.size[0]), "ry")
        rx = te.reduce_axis((0, self.window.size[1]), "rx")
        rc = te.reduce_axis((0, self.image[3]), "rc")
        tile = (self.height, self.width, self.tile.columns)
        return te.compute(
            (*self.chunks, outputs, self.down, self.across, *tile),
            lambda fy, fx, t, dy, dx, y, x, lane: te.sum(
                pixel((fy, fx, dy, dx), y * row_stride + ry, x * column_stride + rx, rc)
                * exact[t, ry, rx, rc, lane],
                axis=[ry, rx, rc],
            ),
            name=EXACT,
            attrs=named(*self.place, "y", "x", LANE, "window_y", "window_x", "input"),
        )

    def _data(self, pixel: Callable[..., Expr]) -> te.Tensor:
        """Inputs of every tile, transformed: ``[chunk, group, point, tile, channel]``.

        With tiles of one row ``[chunk, point, stretch, channel]``, a stretch being what a tile sees
        of one row of the image: some of them, a row apart, are what it is computed from.
        """
        down, across, group = self.vertical, self.horizontal, self.tile.rows

        def stretch(fy: Expr, fx: Expr, p: Expr, number: Expr, c: Expr) -> Expr:
            place = (fy, fx, number // self.across, number % self.across)
            return across.data(p, lambda x: pixel(place, 0, x, c))

        if self.taps > 1:
            shape = (*self.chunks, self.points, prod(self.stretches), self.channels)
            return te.compute(
                shape, stretch, name=DATA, attrs=named(*_PLACE, "point", ROW, "channel")
            )

        def half(fy: Expr, fx: Expr, g: Expr, r: Expr, p: Expr, x: Expr, c: Expr) -> Expr:
            number = self._number(g, r)
            place = (fy, fx, number // self.across, number % self.across)
            return down.data(p, lambda y: pixel(place, y, x, c))

        shape = (*self.chunks, self.groups, group, down.points, across.reach, self.channels)
        names = named(*_PLACE, "group", ROW, "point", "x", "channel")
        part = te.compute(shape, half, name=DOWN, attrs=names)

        def whole(fy: Expr, fx: Expr, g: Expr, p: Expr, r: Expr, c: Expr) -> Expr:
            row, column = p // across.points, p % across.points
            return across.data(column, lambda x: part[fy, fx, g, r, row, x, c])

        shape = (*self.chunks, self.groups, self.points, group, self.channels)
        axes = named(*_PLACE, "group", "point", ROW, "channel")
        return te.compute(shape, whole, name=DATA, attrs=axes)

    def _planes(self, padded: te.Tensor) -> te.Tensor:
        """The same for an NCHW image: ``[chunk, point, channel of a row, vector, tile]``.

        Tiles that are neighbours see pixels that are some apart, and the same of them are first
        brought together. Vectors of tiles are a dimension, since TVM would else cut the last.
        """
        n, channels, tall, wide = sizes.sizes_of(padded.shape)
        stride, step = self.window.strides[0], self.width * self.window.strides[1]
        lines, columns = self.stretches
        split = te.compute(
            (n, channels, tall, step, wide // step),
            lambda b, c, y, phase, i: padded[b, c, y, i * step + phase],
            name=SPLIT,
            attrs=named("batch", "channel", "y", "phase", "x"),
        )

        def data(fy: Expr, fx: Expr, p: Expr, line: Expr, v: Expr, lane: Expr) -> Expr:
            row, channel = line // channels, line % channels
            tile = fx * self.across + v * self.lanes + lane
            first = fy * self.down
            place = first // self.out[1], channel, first % self.out[1] * stride + row
            return self.horizontal.data(p, lambda x: split[(*place, x % step, tile + x // step)])

        shape = (*self.chunks, self.points, lines, columns // self.lanes, self.lanes)
        axes = named(*_PLACE, "point", "line", "vector", LANE)
        return te.compute(shape, data, name=DATA, attrs=axes)

    def _number(self, group: Expr, tile: Expr) -> Expr:
        """Number the tiles of a chunk consecutively; past the last tile, return it again."""
        number, last = group * self.tile.rows + tile, self.down * self.across - 1
        return tirx.min(number, last) if (last + 1) % self.tile.rows else number

    def _sums(self, data: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """Sums of products: ``[chunk, tile of channels, point, group, tile, channel]``."""
        outputs, depth, lanes = int(packed.shape[0]), self.depth, self.tile.columns
        pieces, within = self.pieces, (self.groups, self.tile.rows)
        k = te.reduce_axis((0, depth), "k")

        def product(*i: Expr) -> Expr:
            fy, fx, t, p, o, g, r, lane = i
            weight = packed[t, p, o * depth + k, lane]
            if self.planar:
                line = g // self.in_row * self.window.strides[0] * self.channels
                tile = g % self.in_row * self.tile.rows + r
                return data[fy, fx, p, line + k, tile // self.lanes, tile % self.lanes] * weight
            if self.taps == 1:
                return data[fy, fx, g, p, r, o * depth + k] * weight
            stretch = self._number(g, r) + o // self.blocks * self.across
            return data[fy, fx, p, stretch, o % self.blocks * depth + k] * weight

        partial = te.compute(
            (*self.chunks, outputs, self.points, pieces, *within, lanes),
            lambda *i: te.sum(product(*i), axis=k),
            name=ANCHOR,
            attrs=noted(self.chunking) | named(*_CHUNK, "block", "group", ROW, LANE, "k"),
        )
        o = te.reduce_axis((0, pieces), "o")

        def whole(fy: Expr, fx: Expr, t: Expr, p: Expr, g: Expr, r: Expr, lane: Expr) -> Expr:
            if pieces == 1:
                return partial[fy, fx, t, p, 0, g, r, lane]
            return te.sum(partial[fy, fx, t, p, o, g, r, lane], axis=o)

        reduced = ["block"] if pieces > 1 else []
        return te.compute(
            (*self.chunks, outputs, self.points, *within, lanes),
            whole,
            name=SUMS,
            attrs=named(*_CHUNK, "group", ROW, LANE, *reduced),
        )

    def _results(self, sums: te.Tensor) -> te.Tensor:
        """Sums transformed back: ``[chunk, tile of channels, row, column, y, x, channel]``."""
        shape = (*self.chunks, int(sums.shape[2]), self.down, self.across)
        lanes, group, columns = self.tile.columns, self.tile.rows, self.horizontal.points

        def product(
            fy: Expr, fx: Expr, t: Expr, dy: Expr, dx: Expr, p: Expr, q: Expr, lane: Expr
        ) -> Expr:
            point = p * columns + q
            if self.planar:
                return sums[fy, fx, t, point, dy * self.in_row + dx // group, dx % group, lane]
            number = dy * self.across + dx
            return sums[fy, fx, t, point, number // group, number % group, lane]

        def down(*i: Expr) -> Expr:
            *place, y, q, lane = i
            return self.vertical.result(y, lambda p: product(*place, p, q, lane))

        half = product
        if self.taps == 1:
            names = named(*self.place, "y", "point", LANE)
            half = te.compute((*shape, self.height, columns, lanes), down, name=UP, attrs=names)
        return te.compute(
            (*shape, self.height, self.width, lanes),
            lambda *i: self.horizontal.result(i[-2], lambda q: half(*i[:-2], q, i[-1])),
            name=RESULT,
            attrs=named(*self.place, "y", "x", LANE),
        )

    def _spoilt(self, result: te.Tensor) -> te.Tensor:
        """For each tile, and register of channels, whether a result is not finite."""
        *shape, height, width, lanes = sizes.sizes_of(result.shape)
        total = te.compute(
            (*shape, lanes),
            lambda *i: _tree(
                [result(*i[:-1], y, x, i[-1]) for y in range(height) for x in range(width)]
            ),
            name=CHECK,
            attrs=named(*self.place, LANE),
        )

        def flag(*i: Expr) -> Expr:
            lane = i[-1] * self.lanes
            size = tirx.abs(_tree([total(*i[:-1], lane + k) for k in range(self.lanes)]))
            no, yes = tirx.const(0, "int32"), tirx.const(1, "int32")
            return tirx.Select(size <= tirx.const(_LARGEST, _DTYPE), no, yes)

        flags = (*shape, lanes // self.lanes)
        return te.compute(flags, flag, name=SPOILT, attrs=named(*self.place, "register"))


def _tree(terms: list[Expr]) -> Expr:
    """The sum of 2, 4, 8 … terms, by halves: a chain of additions would wait for each."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
