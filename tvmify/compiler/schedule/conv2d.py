"""Convolution of NHWC images with packed weights: which kernel, and the direct one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, prod

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler.schedule import choice, depthwise, plans, tiles
from tvmify.compiler.schedule.elementwise import schedule_block
from tvmify.compiler.schedule.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.schedule.legalizing import accumulator, or_zero, plain
from tvmify.compiler.schedule.loops import (
    find,
    fuse,
    keep_in_registers,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.schedule.matmul import Product
from tvmify.compiler.schedule.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.schedule.pointwise import strided
from tvmify.compiler.schedule.prefetch import fetch_ahead
from tvmify.compiler.schedule.rule import Rule
from tvmify.compiler.schedule.windows import Window, pad
from tvmify.compiler.schedule.winograd import Winograd, fits

#: Names of the template's blocks: the padded image, the tile of sums over a block of input
#: channels, the sums of all blocks if there are several, the store.
PAD, ANCHOR, SUMS, STORE = "conv_pad", "conv_tile", "conv_sums", "conv_store"
#: Annotations of the tile of sums: see `Convolution`.
ROWS_FIRST, SIDE_BY_SIDE = "tvmify.rows_first", "tvmify.side_by_side"
#: Annotation of the same: input channels in all blocks together.
DEPTH = "tvmify.depth"
#: Size of one block of weights, in sizes of the first cache. On 512 channels at 7 × 7 and three
#: more shapes, half a cache was 20 to 40 % faster than no blocks, and twice as much 2 % slower.
_PANEL = 0.625
#: Fewer tasks than this cannot be shared out among the cores of a small machine.
_FEW_TASKS = 4
#: Reductions over so few input channels are unrolled: the loop would cost more than its body.
_FEW_CHANNELS = 4


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.conv2d`` on NHWC images and OHWI weights; other layouts as TVM does."""
    attributes = call.attrs
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    image, kernel = ([int(size) for size in argument.ty.shape] for argument in call.args)
    out = tuple(int(size) for size in call.ty.shape)
    if layouts != ("NHWC", "OHWI", "NHWC") or min(*image, *kernel, *out) == 0:
        return plain(builder, call)
    data, weight = call.args
    groups, dtype = int(attributes.groups), str(call.ty.dtype)
    window = Window.of(attributes, kernel[1:3])
    machine = Microarchitecture.current()
    if kernel[3] == 1 and groups == image[3] and kernel[0] == groups:
        template, pack = depthwise.template(out, window, dtype, machine)
        packs, hint = (pack,), "depthwise_conv2d"
    elif window.is_pointwise and groups == 1:
        pixels = [*out[:3], image[3]]
        product = Product.of(pixels, (kernel[3], kernel[0]), out, dtype, machine)
        template, packs, hint = strided(product, window), (product.pack_pointwise,), "conv2d_1x1"
    else:
        candidates = algorithms(image, kernel, out, window, groups, dtype, machine)
        workload = f"conv2d {image} {kernel} {window} {groups} {dtype}"
        chosen = choice.choose(workload, candidates)
        template, packs, hint = chosen.kernel, chosen.packs, chosen.hint
    packed = [
        builder.emit(builder.call_te(pack, weight, primfunc_name_hint=f"pack_{hint}"))
        for pack in packs
    ]
    return builder.call_te(
        template, data, *packed, primfunc_name_hint=hint, primfunc_attrs={"op_pattern": 4}
    )


def algorithms(
    image: list[int],
    kernel: list[int],
    out: tuple[int, ...],
    window: Window,
    groups: int,
    dtype: str,
    machine: Microarchitecture,
) -> list[Convolution | Winograd]:
    """All ways to compute a convolution, the one estimated fastest first.

    An estimate counts products, the work of transforms, and the weights, which come from beyond
    the caches: F4 multiplies a quarter as often as the direct kernel, and reads four times as
    many weights. Where accuracy is to be strict, there is the direct kernel alone.
    """
    bits = bits_of(accumulator(dtype))
    side = _side_by_side(kernel, groups, dtype, machine)
    ranked = tiles.ranked_image(out[1], out[2], side * kernel[0] // groups, machine, bits)
    if side > 1:  # LLVM keeps a vector of inputs for each pixel, beside the sums
        most = machine.accumulators // 4 * machine.lanes(bits)
        ranked = [tile for tile in ranked if tile.pixels * tile.channels <= most]
    others = tiles.alternatives(
        ranked, lambda tile: tile.channels, lambda tile: tile.down, lambda tile: tile.pixels
    )
    direct, *others = (
        Convolution.of(image, kernel, out, window, groups, dtype, machine, tile)
        for tile in [ranked[0], *others]
    )
    found: list[Convolution | Winograd] = [direct]
    wide = min(image[3], out[3]) >= machine.lanes()
    if wide and fits(window, groups, dtype) and not choice.is_strict():
        found += [
            Winograd.of(image, out, window, results, shared, machine)
            for results in (2, 4)
            for shared in (False, True)
        ]
    found.sort(key=lambda algorithm: algorithm.nanoseconds(machine))
    return list(dict.fromkeys(found + direct.otherwise(machine) + others))


@dataclass(frozen=True)
class Convolution:
    """One convolution, cut into tiles of `down` × `across` pixels and `channels` channels.

    Attributes
    ----------
    groups, side, out_channels, in_channels
        So many groups of the convolution as fill whole vectors, `side`, are one group here, with
        `out_channels` together; each of these still sees its own `in_channels` alone.
    block
        Input channels whose weights stay in L1 while all pixels meet them, and the next are
        fetched: each weight is then read from afar once, and nobody waits for it. All input
        channels where their weights fit into L1, where the sums of all pixels do not fit into L2,
        or where too few output channels could be shared out. Unless accuracy is to be strict:
        sums of short sums are more exact.
    rows_first
        Whether all output channels of some rows of pixels come before the next rows.
    """

    image: tuple[int, ...]
    out: tuple[int, ...]
    window: Window
    groups: int
    side: int
    out_channels: int
    in_channels: int
    down: int
    across: int
    channels: int
    block: int
    rows_first: bool
    dtype: str

    @classmethod
    def of(
        cls,
        image: list[int],
        kernel: list[int],
        out: tuple[int, ...],
        window: Window,
        groups: int,
        dtype: str,
        machine: Microarchitecture,
        tile: tiles.ImageTile,
    ) -> Convolution:
        """Describe a convolution in tiles, and choose how the reduction is cut."""
        side = _side_by_side(kernel, groups, dtype, machine)
        groups //= side
        per_group = kernel[0] // groups
        bits = bits_of(accumulator(dtype))
        down, across, channels = tile
        tile_bytes = prod(window.size) * channels * bits // 8
        sums = prod(out[1:3]) * channels * bits // 8
        tasks = groups * -(-per_group // channels)
        most = kernel[3]
        several = prod(out[1:3]) > down * across and out[0] * tasks >= _FEW_TASKS
        if several and sums <= machine.l2_bytes // 2 and tile_bytes * most > machine.l1_bytes:
            most = int(machine.l1_bytes * _PANEL) // tile_bytes
        if choice.is_strict():
            most = min(most, max(plans.LONGEST_STRICT_SUM // prod(window.size), 2))
        block = _block(kernel[3], most, side)
        read, weights = (prod(sizes) * bits // 8 for sizes in (image, kernel))
        by_channel = weights + read * tasks * machine.distance(read)
        by_row = read + weights * -(-out[1] // down) * machine.distance(weights)
        rows_first = block == kernel[3] and (tasks == 1 or by_row < by_channel)
        tiled = (down, across, channels, block, rows_first)
        return cls(tuple(image), out, window, groups, side, per_group, kernel[3], *tiled, dtype)

    def __str__(self) -> str:
        order = "rows" if self.rows_first else "channels"
        tile = f"{self.down}x{self.across}x{self.channels}"
        return f"direct {tile} depth {self.block} {order} first"

    def otherwise(self, machine: Microarchitecture) -> list[Convolution]:
        """Return the same tiles in another order, or with another block."""
        if choice.is_strict():
            return []
        if self.block < self.in_channels:
            return [replace(self, block=self.in_channels)]
        element = bits_of(accumulator(self.dtype)) // 8
        tile_bytes = prod(self.window.size) * self.channels * element
        found = []
        if prod(self.out[1:3]) * self.channels * element <= machine.l2_bytes // 2:  # the sums
            most = int(machine.l1_bytes * _PANEL) // tile_bytes
            block = _block(self.in_channels, most, self.side)
            if block < self.in_channels:
                found.append(replace(self, block=block, rows_first=False))
        if self.channels < self.out_channels:
            found.append(replace(self, rows_first=not self.rows_first))
        return found

    hint = "conv2d"

    @property
    def packs(self) -> tuple[Callable[[te.Tensor], te.Tensor], ...]:
        """What makes the kernel's arguments of the weights."""
        return (self.pack,)

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes."""
        n, height, width, _ = self.out
        pixels = n * -(-height // self.down) * self.down * -(-width // self.across) * self.across
        outputs = self.groups * -(-self.out_channels // self.channels) * self.channels
        weights = outputs * prod(self.window.size) * self.in_channels
        return machine.nanoseconds(
            pixels * weights, weights * bits_of(accumulator(self.dtype)) // 8
        )

    def pack(self, kernel: te.Tensor) -> te.Tensor:
        """Lay weights out as ``[group, tile, block, height, width, input, channel]``."""
        count, dtype = self.out_channels, accumulator(self.dtype)

        def element(
            g: tirx.Var,
            tile: tirx.Var,
            block: tirx.Var,
            y: tirx.Var,
            x: tirx.Var,
            i: tirx.Var,
            lane: tirx.Var,
        ) -> Expr:
            channel = tile * self.channels + lane
            along = block * self.block + i
            value = kernel[g * count + channel, y, x, along].astype(dtype)
            sizes = (channel, count, self.channels), (along, self.in_channels, self.block)
            return or_zero(value, *sizes)

        shape = (
            self.groups,
            -(-count // self.channels),
            -(-self.in_channels // self.block),
            *self.window.size,
            self.block,
            self.channels,
        )
        return te.compute(shape, element, name="conv_pack")

    def kernel(self, image: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """The convolution of an image with packed weights."""
        n, height, width, _ = self.out
        down, across, window = self.down, self.across, self.window
        dtype = accumulator(self.dtype)
        tiled = (-(-height // down), -(-width // across))
        padded = pad(image, window, (tiled[0] * down, tiled[1] * across), PAD)
        ry = te.reduce_axis((0, window.size[0]), "ry")
        rx = te.reduce_axis((0, window.size[1]), "rx")
        rc = te.reduce_axis((0, self.block), "rc")
        blocks = -(-self.in_channels // self.block)

        def tile(b: tirx.Var, g: tirx.Var, co: tirx.Var, o: Expr, *inner: tirx.Var) -> Expr:
            yo, xo, yi, xi, ci = inner
            y, x = window.at(yo * down + yi, xo * across + xi, ry, rx)
            group = g * self.side
            if self.side > 1:
                group += (co * self.channels + ci) // (self.out_channels // self.side)
            channel = group * self.in_channels + o * self.block + rc
            pixel = padded[b, y, x, channel].astype(dtype)
            return te.sum(pixel * packed[g, co, o, ry, rx, rc, ci], axis=[ry, rx, rc])

        attrs = {ROWS_FIRST: self.rows_first, SIDE_BY_SIDE: self.side > 1, DEPTH: self.in_channels}

        head = (n, self.groups, int(packed.shape[1]))
        shape = (*tiled, down, across, self.channels)
        sums = te.compute((*head, blocks, *shape), tile, name=ANCHOR, attrs=attrs)
        if blocks > 1:
            o = te.reduce_axis((0, blocks), "o")
            partial = sums
            sums = te.compute(
                (*head, 1, *shape),
                lambda *i: te.sum(partial(*i[:3], o, *i[4:]), axis=o),
                name=SUMS,
            )

        def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
            g, c = c // self.out_channels, c % self.out_channels
            outer = (b, g, c // self.channels, 0, y // down, x // across)
            inner = (y % down, x % across, c % self.channels)
            return sums(*outer, *inner).astype(self.dtype)

        return te.compute(self.out, store, name=STORE)


class Conv2d(Rule):
    """Tiles of pixels × channels in registers, stored with the element-wise chain that follows."""

    name = "conv2d"

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        if find(sch, ANCHOR) is None:
            return None
        inline_producers(sch, ANCHOR, keep=(PAD,))
        store, rest = fuse_epilogue(sch, STORE)
        anchor = sch.get_sblock(ANCHOR)
        sizes = [int(variable.dom.extent) for variable in sch.get(anchor).iter_vars]
        groups, blocks = sizes[1], sizes[3]
        down, across, channels = sizes[6:9]
        annotations, work = sch.get(anchor).annotations, float(prod(sizes))
        rows_first, side = (bool(annotations[name]) for name in (ROWS_FIRST, SIDE_BY_SIDE))
        bits, depth = bits_of(str(sch.get(anchor).writes[0].source.dtype)), int(annotations[DEPTH])

        b, y, x, c = sch.get_loops(store)
        yo, yi = sch.split(y, [None, down])
        xo, xi = sch.split(x, [None, across])
        if groups > 1:
            g, c = sch.split(c, [groups, None])
        co, ci = sch.split(c, [None, channels])
        outer = [b] + ([g] if groups > 1 else [])
        if rows_first:
            sch.reorder(*outer, yo, co, xo, yi, xi, ci)
            outermost = fuse(sch, [*outer, yo])
        else:
            sch.reorder(*outer, co, yo, xo, yi, xi, ci)
            outermost = fuse(sch, [*outer, co] if blocks > 1 else [*outer, co, yo])
        parallel_if_worth(sch, outermost, machine, work)
        target, at, block = store, xo, None
        if blocks > 1:
            target = sch.get_sblock(SUMS)
            at, block = _block_by_block(sch, target, outermost)
        sch.compute_at(anchor, at, preserve_unit_loops=True)
        lanes = tiles.lanes_for(channels, machine, bits)
        # Where groups lie side by side, vectors of inputs are whole for a known channel alone.
        if depth % sizes[11] == 0 and sizes[11] <= (lanes if side else _FEW_CHANNELS):
            sch.unroll(sch.get_loops(anchor)[-1])
        whole = depth, 3
        along = keep_in_registers(sch, anchor, target, machine, rows=2, reductions=3, whole=whole)
        if block is not None:
            fetch_ahead(sch, along, prod(sizes[4:6]), [4, 5])
            initial = sch.decompose_reduction(target, block)
            for nest in (initial, store):
                vectorize(sch, sch.get_loops(nest)[-1], lanes)
        near = sizes[11] >= _FEW_CHANNELS if side else rows_first and groups == 1
        if find(sch, PAD) is not None and near:
            # The few rows that the window sees are padded where they are used, in L1.
            padding = sch.get_sblock(PAD)
            sch.compute_at(padding, outermost, preserve_unit_loops=True)
            channel = sch.get_loops(padding)[-1]
            vectorize(sch, channel, machine.lanes(output_bits(sch, padding)), unroll=False)
        elif find(sch, PAD) is not None:
            rest = [PAD, *rest]
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch


def _side_by_side(kernel: list[int], groups: int, dtype: str, machine: Microarchitecture) -> int:
    """How many groups to compute at once, so that their channels fill vectors.

    Each lane reads the inputs of its own group: a vector of neighbours, and a shuffle. Inputs that
    lie further apart than two vectors hold are no neighbours.
    """
    lanes, per_group = machine.lanes(bits_of(accumulator(dtype))), kernel[0] // groups
    side = lanes // gcd(lanes, per_group)
    apart = kernel[3] * (-(-lanes // per_group) - 1)
    return side if groups % side == 0 and apart < 2 * lanes else 1


def _block(channels: int, most: int, side: int) -> int:
    """How many of so many input channels a block has, if `most` is the limit."""
    if most < 2:
        return channels
    block = plans.split_evenly(channels, most)
    # Two uneven blocks cost more than they save, and those of groups side by side are unrolled.
    together = side > 1 or channels < 2 * most
    return channels if channels % block and together else block


def _block_by_block(sch: s_tir.Schedule, sums: SBlockRV, channels: LoopRV) -> tuple[LoopRV, LoopRV]:
    """Let all pixels meet one block of input channels after the other.

    Returns the loop that holds a tile of pixels, and the loop over blocks.
    """
    sch.compute_at(sums, channels, preserve_unit_loops=True)
    *_, row, across, y, x, channel, block = sch.get_loops(sums)
    sch.reorder(block, row, across, y, x, channel)
    return across, block
