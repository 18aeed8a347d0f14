"""The direct convolution of NHWC images: how it is cut, and what is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, prod
from statistics import fmean
from typing import Any

from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.kernels.common import choice, tiles
from tvmify.compiler.kernels.common.attributes import DEPTH, ROWS_FIRST
from tvmify.compiler.kernels.common.axes import LANE, ROW, named
from tvmify.compiler.kernels.common.last_block import open_ended
from tvmify.compiler.kernels.common.legalizing import accumulator, or_zero
from tvmify.compiler.kernels.common.sums import longest_sum, split_evenly
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.windows import Window, pad
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of

#: Names of the template's blocks: the padded image, the tile of sums over a block of input
#: channels, the sums of all blocks if there are several, the store.
PAD, ANCHOR, SUMS, STORE = "conv_pad", "conv_tile", "conv_sums", "conv_store"
#: Annotation of the tile of sums: `Direct.side`.
SIDE_BY_SIDE = "tvmify.side_by_side"


def candidates(
    convolution: Convolution, machine: Microarchitecture, *, of_any_size: bool = False
) -> list[Direct]:
    """Return the direct kernels worth trying, the one estimated fastest first.

    Parameters
    ----------
    convolution
        With numbers for all sizes.
    of_any_size
        Whether height or width are merely likely: then a tile is of one row, or of one column of a
        sequence, and all input channels are one block.
    """
    kernel, out, groups, bits = (
        convolution.kernel,
        convolution.out,
        convolution.groups,
        convolution.bits,
    )
    side = _side_by_side(convolution, machine)
    columns = side * kernel[0] // groups
    ranked = [
        tile
        for tile in tiles.ranked_image(out[1], out[2], columns, machine, bits)
        if tiles.leaves_register(tile.product, machine, bits, columns)
    ]
    if side > 1:  # LLVM keeps a vector of inputs for each pixel, beside the sums
        most = int(machine.accumulators * CONVOLUTION.grouped_sums) * machine.lanes(bits)
        ranked = [tile for tile in ranked if tile.pixels * tile.channels <= most and not tile.flat]
    if of_any_size:
        ranked = [t for t in ranked if not t.flat and (t.down == 1 or out[2] == 1)]
    channels = (groups // side, side, columns, kernel[3])
    uncut = Direct(
        convolution.image,
        out,
        convolution.window,
        *channels,
        ranked[0],
        kernel[3],
        False,
        convolution.dtype,
        convolution.planar,
    )
    if of_any_size:
        rows_first = uncut.cut(ranked[0], machine).rows_first
        return [replace(uncut, rows_first=rows_first or uncut.fits_cache(machine))]
    by_rows = [tile for tile in ranked if not tile.flat]
    if uncut.cut(by_rows[0], machine).rows_first:  # needs whole rows: each task pads its own
        ranked = by_rows
    others = tiles.alternatives(
        ranked, lambda tile: tile.channels, lambda tile: tile.down, lambda tile: tile.pixels
    )
    first, *others = (uncut.cut(tile, machine) for tile in [ranked[0], *others])
    return list(dict.fromkeys([first, *first.otherwise(machine), *others]))


@dataclass(frozen=True)
class Direct:
    """One convolution, cut into tiles of pixels × channels.

    Attributes
    ----------
    groups, side, out_channels, in_channels
        `side` groups of the convolution, which together fill whole vectors, are one group here,
        with `out_channels` in all; each of these still reads its own `in_channels` only.
    block
        Input channels whose weights stay in L1 while all pixels meet them, and the next are
        fetched: each weight is then read from afar once, without a wait. All input
        channels where their weights fit into L1, where the sums of all pixels do not fit into L2,
        or where too few output channels could be shared out. Unless accuracy is to be strict:
        sums of short sums are more exact.
    rows_first
        Whether all output channels of some rows of pixels come before the next rows.
    planar
        Whether the image is NCHW; `image` is its NHWC shape all the same.
    """

    image: tuple[Any, ...]
    out: tuple[Any, ...]
    window: Window
    groups: int
    side: int
    out_channels: int
    in_channels: int
    tile: tiles.ImageTile
    block: int
    rows_first: bool
    dtype: str
    planar: bool

    def __str__(self) -> str:
        order = "rows" if self.rows_first else "channels"
        return f"direct {self.tile} depth {self.block} {order} first"

    @property
    def element(self) -> int:
        """Bytes of a sum."""
        return bits_of(accumulator(self.dtype)) // 8

    def cut(self, tile: tiles.ImageTile, machine: Microarchitecture) -> Direct:
        """Return the same convolution in these tiles, and choose how the reduction is cut."""
        tiled = replace(self, tile=tile)
        tasks = self.groups * -(-self.out_channels // tile.channels)
        several = prod(self.out[1:3]) > tile.pixels and self.out[0] * tasks >= CONVOLUTION.few_tasks
        most = tiled._longest(machine) if several else self.in_channels
        places = prod(self.window.size)
        longest = longest_sum(places * self.in_channels)
        most = min(most, max(longest // places, 1))
        block = _block(self.in_channels, most, self.side)
        image = prod(self.image[1:]) * self.element
        kernel = (self.groups, self.out_channels, *self.window.size, self.in_channels)
        weights = prod(kernel) * self.element
        rows, _ = tile.counts(*self.out[1:3])
        by_channel = weights + image * tasks * machine.distance(image)
        by_row = image + weights * rows * machine.distance(weights)
        worth = by_row < by_channel and self.out[0] * rows >= CONVOLUTION.many_rows
        by_rows = not tile.flat and (tasks == 1 or worth)
        return replace(tiled, block=block, rows_first=block == self.in_channels and by_rows)

    def fits_cache(self, machine: Microarchitecture) -> bool:
        """Whether all weights stay in L2 while one row of pixels after the other meets them."""
        places = prod(self.window.size) * self.groups * self.out_channels * self.in_channels
        return places * self.element <= machine.working_set

    def otherwise(self, machine: Microarchitecture) -> list[Direct]:
        """Return the same tiles in another order, or with another block."""
        if choice.is_strict():
            return []
        if self.block < self.in_channels:
            return [replace(self, block=self.in_channels)]
        found = []
        block = _block(self.in_channels, self._longest(machine, few=0), self.side)
        if block < self.in_channels:
            found.append(replace(self, block=block, rows_first=False))
        if self.tile.channels < self.out_channels and not self.tile.flat:
            found.append(replace(self, rows_first=not self.rows_first))
        return found

    def _longest(self, machine: Microarchitecture, few: int = CONVOLUTION.few_blocks) -> int:
        """How many input channels a block may have: as many as a panel in L1 has.

        All of them where L2 does not hold all sums, and where `few` blocks would do and L1 does
        not hold all sums.
        """
        of_a_pixel = self.tile.channels * self.element
        sums = prod(self.out[1:3]) * of_a_pixel
        most = int(machine.l1_bytes * CONVOLUTION.panel) // (prod(self.window.size) * of_a_pixel)
        whole = sums > machine.l1_bytes and self.in_channels <= few * most
        return self.in_channels if whole or sums > machine.working_set else most

    hint = "conv2d"

    @property
    def packs(self) -> tuple[Callable[[te.Tensor], te.Tensor], ...]:
        """What makes the kernel's arguments of the weights."""
        return (self.pack,)

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes; on average of likely widths, if that is symbolic."""
        n, height, width = sizes.hints(self.out[:3])
        pixels: float = n * prod(self.tile.counts(height, width)) * self.tile.pixels
        if not sizes.is_static(self.out[2]):  # the last tile of a row is computed as a whole
            across = self.tile.across
            likely = sizes.around(self.out[2])
            pixels = n * height * width * fmean(-(-x // across) * across / x for x in likely)
        channels = self.tile.channels
        outputs = self.groups * -(-self.out_channels // channels) * channels
        weights = outputs * prod(self.window.size) * self.in_channels
        return machine.nanoseconds(pixels * weights, weights * self.element)

    def pack(self, kernel: te.Tensor) -> te.Tensor:
        """Lay weights out as ``[group, tile, block, height, width, input, channel]``."""
        count, dtype = self.out_channels, accumulator(self.dtype)
        channels = self.tile.channels

        def element(
            g: tirx.Var,
            tile: tirx.Var,
            block: tirx.Var,
            y: tirx.Var,
            x: tirx.Var,
            i: tirx.Var,
            lane: tirx.Var,
        ) -> Expr:
            channel = tile * channels + lane
            along = block * self.block + i
            value = kernel[g * count + channel, y, x, along].astype(dtype)
            sizes = (channel, count, channels), (along, self.in_channels, self.block)
            return or_zero(value, *sizes)

        shape = (
            self.groups,
            -(-count // channels),
            -(-self.in_channels // self.block),
            *self.window.size,
            self.block,
            channels,
        )
        return te.compute(shape, element, name="conv_pack")

    def kernel(self, image: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """The convolution of an image with packed weights."""
        # In the symbols of the argument, since each function has its own.
        n, (height, width) = sizes.number_or_expression(image.shape[0]), self.out[1:3]
        window, dtype = self.window, accumulator(self.dtype)
        down, across, channels, flat = self.tile
        tiled = sizes.ceil_div(height, down), sizes.ceil_div(width, across)
        if flat:
            tiled = self.tile.counts(height, width)
        pixels = (height, width) if flat else (tiled[0] * down, tiled[1] * across)
        padded = pad(image, window, pixels, PAD, planar=self.planar)
        ry = te.reduce_axis((0, window.size[0]), "ry")
        rx = te.reduce_axis((0, window.size[1]), "rx")
        rc = te.reduce_axis((0, self.block), "rc")
        blocks = -(-self.in_channels // self.block)

        def tile(b: tirx.Var, g: tirx.Var, co: tirx.Var, o: Expr, *inner: tirx.Var) -> Expr:
            yo, xo, yi, xi, ci = inner
            y, x = yo * down + yi, xo * across + xi
            if flat:  # past the end, sums that are not read
                y, x = tirx.min(x // width, height - 1), x % width
            y, x = window.at(y, x, ry, rx)
            group = g * self.side
            if self.side > 1:
                group += (co * channels + ci) // (self.out_channels // self.side)
            channel = group * self.in_channels + o * self.block + rc
            place = (b, channel, y, x) if self.planar else (b, y, x, channel)
            pixel = padded(*place).astype(dtype)
            return te.sum(pixel * packed[g, co, o, ry, rx, rc, ci], axis=[ry, rx, rc])

        nest, within = ("image", "group", "channel_tile"), ("y_tile", "x_tile", "y", ROW, LANE)
        attrs = {
            ROWS_FIRST: self.rows_first,
            SIDE_BY_SIDE: self.side,
            DEPTH: self.in_channels,
            **open_ended(self.in_channels, self.block),
            **named(*nest, "block", *within, "window_y", "window_x", "input"),
        }
        head = (n, self.groups, int(packed.shape[1]))
        shape = (*tiled, down, across, channels)
        sums = te.compute((*head, blocks, *shape), tile, name=ANCHOR, attrs=attrs)
        if blocks > 1:
            o = te.reduce_axis((0, blocks), "o")
            partial = sums
            sums = te.compute(
                (*head, 1, *shape),
                lambda *i: te.sum(partial(*i[:3], o, *i[4:]), axis=o),
                name=SUMS,
                attrs=named(*nest, "all_blocks", *within, "block"),
            )

        return self._stored(sums)

    def _stored(self, sums: te.Tensor) -> te.Tensor:
        """Return the result, whose pixels and channels are gathered from the tiles of sums."""
        n, (height, width) = sizes.number_or_expression(sums.shape[0]), self.out[1:3]
        down, across, channels, flat = self.tile
        grouped = self.groups > 1

        def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, *group_and_channel: tirx.Var) -> Expr:
            *group, c = group_and_channel
            outer = (b, group[0] if group else 0, c // channels, 0, y // down, x // across)
            inner = (y % down, x % across, c % channels)
            return sums(*outer, *inner).astype(self.dtype)

        # Groups and rows of pixels get a dimension of their own again only where they are stored:
        # TVM's schedules do not see that a quotient of merged loops is one of them.
        lines = (1, height * width) if flat else (height, width)
        channel = (self.groups, self.out_channels) if grouped else (self.out_channels,)
        names = named("image", "y", "x", *(["group"] if grouped else []), "channel")
        stored = te.compute((n, *lines, *channel), store, name=STORE, attrs=names)
        if not flat and not grouped:
            return stored

        def whole(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
            pixel = (0, y * width + x) if flat else (y, x)
            channel = (c // self.out_channels, c % self.out_channels) if grouped else (c,)
            return stored(b, *pixel, *channel)

        return te.compute((n, height, width, self.out[3]), whole, name="conv_whole")


def _side_by_side(convolution: Convolution, machine: Microarchitecture) -> int:
    """How many groups to compute at once, so that their channels fill vectors.

    Each lane reads the inputs of its own group: a vector of neighbours, and a shuffle. Inputs that
    lie further apart than two vectors hold are not neighbours.
    """
    kernel, groups = convolution.kernel, convolution.groups
    lanes, per_group = machine.lanes(convolution.bits), kernel[0] // groups
    side = lanes // gcd(lanes, per_group)
    distance = kernel[3] * (-(-lanes // per_group) - 1)
    return side if groups % side == 0 and distance < 2 * lanes else 1


def _block(channels: int, most: int, side: int) -> int:
    """How many input channels a block has, if `most` is the limit."""
    if most < 1:
        return channels
    block = split_evenly(channels, most)
    # Two uneven blocks cost more than they save, and those of groups side by side are unrolled.
    keeps_whole = side > 1 or channels < 2 * most
    return channels if channels % block and keeps_whole else block
