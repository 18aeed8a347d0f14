"""Convolution of NHWC images with packed weights: which kernel, and the direct one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler.schedule import choice, depthwise, plans, tiles
from tvmify.compiler.schedule.elementwise import schedule_block
from tvmify.compiler.schedule.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.schedule.legalizing import accumulator, plain
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
from tvmify.compiler.schedule.rule import Rule
from tvmify.compiler.schedule.windows import Window, pad
from tvmify.compiler.schedule.winograd import Winograd, fits

#: Names of the template's blocks: the padded image, the tile of sums over a block of input
#: channels, the sums of all blocks if there are several, the store.
PAD, ANCHOR, SUMS, STORE = "conv_pad", "conv_tile", "conv_sums", "conv_store"
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
        product = Product.of(image, (kernel[3], kernel[0]), out, dtype, machine)
        template, packs, hint = product.with_packed, (product.pack_pointwise,), "conv2d_1x1"
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


def legalize_gated(builder: relax.BlockBuilder, call: Call, image: Expr, gate: Expr) -> Expr | None:
    """Lower ``conv2d(image * gate)``, a pointwise one; None if it is another.

    So does squeeze-and-excitation end. To multiply rows that are in the first cache costs next to
    nothing; to multiply the image, a pass over it.
    """
    attributes, kernel = call.attrs, [int(size) for size in call.args[1].ty.shape]
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    n, *_, channels = shape = [int(size) for size in image.ty.shape]
    dtype = str(call.ty.dtype)
    alike = [int(size) for size in gate.ty.shape] == [n, 1, 1, channels] and not any(
        str(x.ty.dtype) != dtype for x in (image, gate)
    )
    pointwise = Window.of(attributes, kernel[1:3]).is_pointwise and int(attributes.groups) == 1
    if layouts != ("NHWC", "OHWI", "NHWC") or not alike or not pointwise or 0 in shape + kernel:
        return None
    out = tuple(int(size) for size in call.ty.shape)
    left = (prod(out[:-1]), channels)
    product = Product.of(left, (channels, kernel[0]), out, dtype, Microarchitecture.current())
    packed = builder.call_te(
        product.pack_pointwise, call.args[1], primfunc_name_hint="pack_conv2d_1x1"
    )
    return builder.call_te(
        product.with_gated,
        image,
        gate,
        builder.emit(packed),
        primfunc_name_hint="gated_conv2d_1x1",
        primfunc_attrs={"op_pattern": 4},
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
    ranked = tiles.ranked_image(out[1], out[2], kernel[0] // groups, machine, bits)
    direct, *others = (
        Convolution.of(image, kernel, out, window, groups, dtype, machine, tile)
        for tile in ranked[: tiles.MOST_CANDIDATES]
    )
    found: list[Convolution | Winograd] = [direct]
    wide = min(image[3], out[3]) >= machine.lanes()
    if wide and fits(window, groups, dtype) and not choice.is_strict():
        found += [Winograd.of(image, out, window, results, machine) for results in (2, 4)]
    found.sort(key=lambda algorithm: algorithm.nanoseconds(machine))
    return found + others


@dataclass(frozen=True)
class Convolution:
    """One convolution, cut into tiles of `down` × `across` pixels and `channels` channels.

    Attributes
    ----------
    block
        Input channels whose weights stay in L1 while all pixels meet them: where there are few
        pixels, weights are what takes time, and each is to be read from afar once. All input
        channels where this does not pay, unless accuracy is to be strict: sums of short sums are
        more exact.
    """

    image: tuple[int, ...]
    out: tuple[int, ...]
    window: Window
    groups: int
    out_channels: int
    in_channels: int
    down: int
    across: int
    channels: int
    block: int
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
        per_group = kernel[0] // groups
        bits = bits_of(accumulator(dtype))
        down, across, channels = tile
        tile_bytes = prod(window.size) * channels * bits // 8
        sums = prod(out[1:3]) * channels * bits // 8
        block = most = kernel[3]
        if 2 * sums <= machine.l1_bytes and 2 * tile_bytes * block > machine.l2_bytes:
            most = machine.l1_bytes // (2 * tile_bytes)
        if choice.is_strict():
            most = min(most, max(plans.LONGEST_STRICT_SUM // prod(window.size), 2))
        if most < block:
            block = max((i for i in range(2, most + 1) if block % i == 0), default=block)
        return cls(
            tuple(image),
            out,
            window,
            groups,
            per_group,
            kernel[3],
            down,
            across,
            channels,
            block,
            dtype,
        )

    def __str__(self) -> str:
        return f"direct {self.down}x{self.across}x{self.channels}"

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
        return machine.nanoseconds(pixels * weights, 4 * weights)

    def pack(self, kernel: te.Tensor) -> te.Tensor:
        """Lay weights out as ``[group, tile, height, width, input, channel of the tile]``."""
        count, dtype = self.out_channels, accumulator(self.dtype)

        def element(
            g: tirx.Var, tile: tirx.Var, y: tirx.Var, x: tirx.Var, i: tirx.Var, lane: tirx.Var
        ) -> Expr:
            channel = tile * self.channels + lane
            value = kernel[g * count + channel, y, x, i].astype(dtype)
            if count % self.channels == 0:
                return value
            return tirx.if_then_else(channel < count, value, tirx.const(0, dtype))

        shape = (
            self.groups,
            -(-count // self.channels),
            *self.window.size,
            self.in_channels,
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
        blocks = self.in_channels // self.block

        def tile(b: tirx.Var, g: tirx.Var, co: tirx.Var, o: Expr, *inner: tirx.Var) -> Expr:
            yo, xo, yi, xi, ci = inner
            y, x = window.at(yo * down + yi, xo * across + xi, ry, rx)
            channel = o * self.block + rc
            pixel = padded[b, y, x, g * self.in_channels + channel].astype(dtype)
            return te.sum(pixel * packed[g, co, ry, rx, channel, ci], axis=[ry, rx, rc])

        head = (n, self.groups, int(packed.shape[1]))
        shape = (*tiled, down, across, self.channels)
        sums = te.compute((*head, blocks, *shape), tile, name=ANCHOR)
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
        _, groups, channel_tiles, blocks, row_tiles, column_tiles, down, across, channels = sizes[
            :9
        ]
        depth, work = blocks * prod(sizes[9:]), float(prod(sizes))
        bits = bits_of(str(sch.get(anchor).writes[0].source.dtype))

        b, y, x, c = sch.get_loops(store)
        yo, yi = sch.split(y, [None, down])
        xo, xi = sch.split(x, [None, across])
        if groups > 1:
            g, c = sch.split(c, [groups, None])
        co, ci = sch.split(c, [None, channels])
        outer = [b] + ([g] if groups > 1 else [])
        pixels = row_tiles * down * column_tiles * across
        image = pixels * blocks * sizes[11] * bits // 8  # about: strides and borders left out
        weights = channel_tiles * channels * depth * bits // 8
        by_channel = weights + image * channel_tiles * machine.distance(image)
        by_row = image + weights * row_tiles * machine.distance(weights)
        rows_outside = blocks == 1 and (channel_tiles == 1 or by_row < by_channel)
        if rows_outside:
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
        if sizes[11] <= _FEW_CHANNELS:
            sch.unroll(sch.get_loops(anchor)[-1])
        lanes = tiles.lanes_for(channels, machine, bits)
        keep_in_registers(sch, anchor, target, lanes, rows=2, reductions=3)
        if block is not None:
            initial = sch.decompose_reduction(target, block)
            for nest in (initial, store):
                vectorize(sch, sch.get_loops(nest)[-1], lanes)
        padding = find(sch, PAD)
        if padding is not None:
            if rows_outside and groups == 1:
                # The few rows that the window sees are padded where they are used, in L1.
                sch.compute_at(padding, outermost, preserve_unit_loops=True)
                channel = sch.get_loops(padding)[-1]
                vectorize(sch, channel, machine.lanes(output_bits(sch, padding)), unroll=False)
            else:
                schedule_block(sch, padding, machine, work)
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch


def _block_by_block(sch: s_tir.Schedule, sums: SBlockRV, channels: LoopRV) -> tuple[LoopRV, LoopRV]:
    """Let all pixels meet one block of input channels after the other.

    Returns the loop that holds a tile of pixels, and the loop over blocks.
    """
    sch.compute_at(sums, channels, preserve_unit_loops=True)
    *_, row, across, y, x, channel, block = sch.get_loops(sums)
    sch.reorder(block, row, across, y, x, channel)
    return across, block
