"""Windows over single channels: depthwise convolution and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm import s_tir, te, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.kernels.common import choice, tiles
from tvmify.compiler.kernels.common.axes import LANE, PIXEL, ROW, Axes, loops_along, named
from tvmify.compiler.kernels.common.loops import (
    extent,
    find,
    fuse,
    iterations,
    keep_in_registers,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.notes import noted
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.conv.windows import Window, continued, pad
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import Size

#: Annotation of the tile, beside its `Window`: `Cut.rows`.
ROWS = "tvmify.rows"
#: The axes of the tile that say which pixel of the window it reads.
_PLACE = ("window_y", "window_x")
#: As the first of them, where results are sums over several images.
_SLICE = "window_z"


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes
    ----------
    pixels
        How many pixels of a row are in registers.
    rows
        Output rows for which the image is padded at a time; 0 if it needs no padding.
    """

    pixels: int
    rows: int

    def __str__(self) -> str:
        return f"{self.pixels} pixels" + f" bands of {self.rows} rows" * (self.rows > 0)


def choose(
    operator: str,
    image: Sequence[Size],
    out: Sequence[Any],
    window: Window,
    dtype: str,
    registers: int,
    bordered: bool = True,
) -> Cut:
    """Choose how the work is cut, with this many registers for results."""
    likely = f"{sizes.hints(image)} {sizes.hints(out)}"
    workload = f"{operator} {likely} {window} {dtype}"
    height, width = sizes.hints(out[1:3])
    return choice.choose(workload, cuts(height, width, registers, bordered))


def cuts(height: int, width: int, registers: int, bordered: bool = True) -> list[Cut]:
    """Return the cuts worth trying, the one that is chosen without a measurement first."""
    ranked = ranked_pixels(width, registers)
    own = Cut(ranked[0], min(height, CONVOLUTION.rows_per_task) if bordered else 0)
    # The best with more or fewer tiles to a row, and one that leaves many registers.
    others = tiles.alternatives(ranked, lambda count: -(-width // count))
    unlike = [*others, *[count for count in ranked if count <= own.pixels // 2][:1]]
    twice = min(height, CONVOLUTION.rows_per_task * 2)
    heights = [twice, max(1, own.rows // 2)] if bordered else []
    found = [replace(own, pixels=count) for count in unlike]
    return list(dict.fromkeys([own, *found, *(replace(own, rows=rows) for rows in heights)]))


def ranked_pixels(width: int, registers: int) -> list[int]:
    """Rank the numbers of pixels in a row of the tile, the best first."""
    # A few pixels hide the latency of the arithmetic; wider tiles read each weight less often.
    return sorted(range(1, max(4, registers) + 1), key=lambda p: (-(-width // p) * (p + 1), -p))


def slide(
    image: te.Tensor,
    window: Window,
    out: tuple[Any, ...],
    names: tuple[str, str, str],
    machine: Microarchitecture,
    *,
    element_bits: int,
    border: float,
    combine: Callable[..., Expr],
    finish: Callable[[Expr, tirx.Var, tirx.Var], Expr],
    cut: Cut,
    slices: int = 1,
) -> te.Tensor:
    """Describe a window over each channel of an NHWC image.

    Parameters
    ----------
    names
        The names of the blocks: the padded image, the tile, its store.
    border
        Value of the padding, if the cut has bands of rows.
    combine
        Called as ``combine(pixel, channel_block, place, lane)``: the reduction of one result over
        the axes of the place in the window.
    finish
        Called as ``finish(result, y, x)``: what is stored.
    cut
        See `choose`.
    slices
        How many consecutive images each image of the result is combined from.
    """
    # In the symbols of the argument, since each function has its own.
    n, (height, width, channels) = sizes.number_or_expression(image.shape[0]), out[1:]
    n = n if slices == 1 else n // slices
    lanes = tiles.lanes_for(channels, machine, element_bits)
    blocks = -(-channels // lanes)
    across = cut.pixels
    tiled = sizes.ceil_div(width, across)
    pixels = height, tiled * across
    if cut.rows:
        padded = pad(image, window, pixels, names[0], border, blocks * lanes, copied=slices > 1)
    else:
        padded = continued(image, window, pixels)
    behind = [te.reduce_axis((0, slices), "rz")] if slices > 1 else []
    ry = te.reduce_axis((0, window.size[0]), "ry")
    rx = te.reduce_axis((0, window.size[1]), "rx")

    def tile(b: tirx.Var, y: tirx.Var, block: tirx.Var, *inner: tirx.Var) -> Expr:
        xo, xi, lane = inner
        source = b * slices + behind[0] if behind else b
        pixel = padded[(source, *window.at(y, xo * across + xi, ry, rx), block * lanes + lane)]
        return combine(pixel, block, [*behind, ry, rx], lane)

    shape = (n, height, blocks, tiled, across, lanes)
    attributes = noted(window) | {ROWS: cut.rows}
    place = [_SLICE, *_PLACE] if behind else _PLACE
    axes = named("image", "y", "block", "row_tile", ROW, LANE, *place)
    results = te.compute(shape, tile, name=names[1], attrs=attributes | axes)

    def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
        return finish(results[b, y, c // lanes, x // across, x % across, c % lanes], y, x)

    return te.compute((n, height, width, channels), store, name=names[2], attrs=named(*PIXEL))


class Channelwise(Rule):
    """Rows of pixels × one vector of channels in registers, stored through the epilogue. With
    padding, each task pads a band of rows of one vector of channels. Without, all channels of a
    tile follow one another, as in memory.
    """

    #: Names of the blocks: the padded image, the tile, its store.
    blocks = ("", "", "")

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `slide`."""
        pad_name, anchor_name, store_name = self.blocks
        inline_producers(sch, anchor_name, keep=(pad_name,))
        store, rest = fuse_epilogue(sch, store_name)
        anchor = sch.get_sblock(anchor_name)
        axes = Axes.of(sch.get(anchor))
        across, lanes = axes.extents(ROW, LANE)
        rows, work = int(sch.get(anchor).annotations[ROWS]), float(iterations(sch, anchor))
        b, y, x, c = loops_along(sch, store, *PIXEL)
        xo, xi = sch.split(x, [None, across])
        co, ci = sch.split(c, [None, lanes])
        if rows:
            yo, yi = sch.split(y, [None, rows])
            sch.reorder(b, yo, co, yi, xo, xi, ci)
            outermost = fuse(sch, [b, yo, co])
        else:
            sch.reorder(b, y, xo, co, xi, ci)
            row = [y, xo] if extent(sch, y) == 1 else [y]  # threads divide a single row
            outermost = fuse(sch, [b, *row])
        parallel_if_worth(sch, outermost, machine, work)
        sch.compute_at(anchor, xo if rows else co, preserve_unit_loops=True)
        if prod(axes.extents(*_PLACE)) <= CONVOLUTION.unrolled_window:
            for loop in loops_along(sch, anchor, *_PLACE):
                sch.unroll(loop)
        place = (_SLICE, *_PLACE) if _SLICE in axes else _PLACE
        keep_in_registers(sch, anchor, [xi, ci], machine, reduced=place)
        padding = find(sch, pad_name)
        if padding is not None:
            sch.compute_at(padding, outermost, preserve_unit_loops=True)
            channel = sch.get_loops(padding)[-1]
            if extent(sch, channel) > 1:
                vectorize(sch, channel, machine.lanes(output_bits(sch, padding)), unroll=False)
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch
