"""Convolution of NHWC images with packed weights: which kernel, and the loops of the direct one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tvm import relax, s_tir, te
from tvm.ir import Call, Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.kernels.common import choice, tiles
from tvmify.compiler.kernels.common.attributes import DEPTH, ROWS_FIRST
from tvmify.compiler.kernels.common.axes import LANE, PIXEL, ROW, Axes, loops_along, own_loops
from tvmify.compiler.kernels.common.legalizing import call_template, plain
from tvmify.compiler.kernels.common.loops import (
    element_count,
    extent,
    find,
    fuse,
    is_compound,
    is_symbolic,
    iterations,
    keep_in_registers,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.common.prefetch import fetch_ahead
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.conv import depthwise, few_outputs
from tvmify.compiler.kernels.conv import template as direct
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.implicit import Implicit
from tvmify.compiler.kernels.conv.pointwise import strided
from tvmify.compiler.kernels.conv.template import (
    ANCHOR,
    PAD,
    SIDE_BY_SIDE,
    STORE,
    SUMS,
    Direct,
)
from tvmify.compiler.kernels.conv.windows import PLANAR, Window, shapes_of
from tvmify.compiler.kernels.conv.winograd import any_size
from tvmify.compiler.kernels.conv.winograd import template as winograd
from tvmify.compiler.kernels.conv.winograd.any_size import AnySize
from tvmify.compiler.kernels.conv.winograd.template import Winograd
from tvmify.compiler.kernels.elementwise.pieces import mark_pieces
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import fuse_epilogue, inline_producers
from tvmify.compiler.kernels.matmul import pairs
from tvmify.compiler.kernels.matmul.template import Product
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.conv2d`` from NHWC to NHWC images with OHWI weights.

    Images that `PlanarImages` left as they were are NCHW. Other layouts are lowered as TVM does.
    """
    convolution = _described(call)
    if convolution is None:
        return plain(builder, call)
    data, weight = call.args
    out, window = convolution.out, convolution.window
    inside = sizes.Variables().of(map(sizes.simplified, out))
    of_any_size = not sizes.is_static(*out[1:])
    machine = Microarchitecture.current()
    if few_outputs.is_faster(convolution, machine):
        return _few_outputs(builder, convolution, data, weight, inside)
    if convolution.is_depthwise:
        template, pack = depthwise.template(
            convolution.image, inside, window, convolution.dtype, machine
        )
        packs, hint = (pack,), "depthwise_conv2d"
    elif convolution.is_product and not of_any_size:
        data, product = _product(builder, convolution, data, weight, machine)
        template, packs, hint = strided(product, window), (product.pack_pointwise,), "conv2d_1x1"
    else:
        if of_any_size:
            chosen = for_any_size(convolution, inside, machine)
        else:
            workload = convolution.likely.workload
            chosen = choice.choose(workload, algorithms(convolution, machine))
            chosen = replace(chosen, image=convolution.image, out=inside)
        if isinstance(chosen, AnySize):
            return chosen.call(builder, data, weight, inside)
        template, packs, hint = chosen.kernel, chosen.packs, chosen.hint
    packed = [
        builder.emit(builder.call_te(pack, weight, primfunc_name_hint=f"pack_{hint}"))
        for pack in packs
    ]
    if of_any_size:
        return call_template(builder, template, [data, *packed], out, inside, hint)
    return builder.call_te(
        template, data, *packed, primfunc_name_hint=hint, primfunc_attrs=Pattern.FUSIBLE.attributes
    )


def _few_outputs(
    builder: relax.BlockBuilder,
    convolution: Convolution,
    data: Expr,
    weight: Expr,
    inside: Sequence[Any],
) -> Expr:
    """Multiply all pixels, and add up windows of the products."""
    weight = few_outputs.as_product(builder, convolution, weight)
    products = relax.op.nn.conv2d(data, weight, data_layout="NHWC", kernel_layout="OHWI")
    products = builder.emit(legalize(builder, builder.normalize(products)))

    def template(products: te.Tensor) -> te.Tensor:
        return few_outputs.sums(convolution, inside, products)

    if sizes.is_static(*convolution.out[1:]):
        return builder.call_te(template, products, primfunc_name_hint="window_sums")
    return call_template(builder, template, [products], convolution.out, inside, "window_sums")


def _described(call: Call) -> Convolution | None:
    """Describe a convolution; None if it has other layouts, or a tensor has no elements."""
    attributes = call.attrs
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    planar = layouts == ("NCHW", "OHWI", "NHWC")
    image, kernel, out = shapes_of(call, *call.args)
    if not planar and layouts != ("NHWC", "OHWI", "NHWC"):
        return None
    if 0 in sizes.hints([*image, *kernel, *out]):
        return None
    if planar:
        image = [image[axis] for axis in PLANAR]
    return Convolution(
        tuple(image),
        tuple(kernel),
        tuple(out),
        Window.of(attributes, kernel[1:3]),
        int(attributes.groups),
        str(call.ty.dtype),
        planar,
    )


def _product(
    builder: relax.BlockBuilder,
    convolution: Convolution,
    image: Expr,
    weight: Expr,
    machine: Microarchitecture,
) -> tuple[Expr, Product]:
    """Return a product of pixels and weights, and its left-hand side: the image, or pairs of it."""
    kernel, out = convolution.kernel, convolution.out
    # When sampled alone, a single channel is not a product.
    several = kernel[0] > 1
    narrow = None
    if several:
        narrow = pairs.rows_of(builder, image, [weight], element_count(out[:3]), machine)
    paired = narrow is not None
    product = Product.of(
        [*out[:3], kernel[3]],
        (kernel[3], kernel[0]),
        out,
        convolution.dtype,
        machine,
        paired=paired,
        row_stride=1 if paired else convolution.window.strides[1],  # pairs are sampled densely
    )
    return image if narrow is None else narrow, product


def algorithms(convolution: Convolution, machine: Microarchitecture) -> list[Direct | Winograd]:
    """Return all kernels for a convolution, the one estimated fastest first. Estimates count
    products, transforms, and weights, which come from beyond the caches: F4 does a quarter of the
    multiplications of the direct kernel and reads four times as many weights; at stride 2, F2 does
    seven tenths, and reads almost three times as many. With strict accuracy, only the direct kernel
    is allowed.
    """
    first, *others = direct.candidates(convolution.likely, machine)
    found: list[Direct | Winograd] = [first]
    if not choice.is_strict():
        of_any_batch = not sizes.is_static(convolution.out[0])
        found += winograd.candidates(convolution.likely, machine, of_any_batch)
    found.sort(key=lambda algorithm: algorithm.nanoseconds(machine))
    return [*found, *others]


def for_any_size(
    convolution: Convolution, out: tuple[Any, ...], machine: Microarchitecture
) -> Direct | Implicit | AnySize:
    """Choose a kernel for images of symbolic height or width.

    Parameters
    ----------
    out
        The shape of the result in plain variables.
    """
    (rows,) = direct.candidates(convolution.likely, machine, of_any_size=True)
    rows = replace(rows, image=convolution.image, out=out)
    if convolution.groups > 1 or convolution.planar:
        return rows
    found: list[Implicit | AnySize] = [Implicit.of_convolution(convolution, out, machine)]
    if not choice.is_strict():
        found += any_size.candidates(convolution, machine)
    best = min(found, key=lambda one: one.nanoseconds(machine))
    return min(rows, best, key=lambda one: one.nanoseconds(machine))


class Conv2d(Rule):
    """Tiles of pixels × channels in registers, stored through the element-wise epilogue."""

    name = "conv2d"
    anchors = frozenset({ANCHOR})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        # 1. Fuse element-wise blocks: prologue into the tile of sums, epilogue into its store.
        inline_producers(sch, ANCHOR, keep=(PAD,))
        store, rest = fuse_epilogue(sch, STORE)
        anchor = sch.get_sblock(ANCHOR)
        axes = Axes.of(sch.get(anchor))
        blocks, down, across, channels, inputs = axes.extents("block", "y", ROW, LANE, "input")
        annotations, work = sch.get(anchor).annotations, float(iterations(sch, anchor))
        rows_first, side = bool(annotations[ROWS_FIRST]), int(annotations[SIDE_BY_SIDE])
        bits, depth = bits_of(str(sch.get(anchor).writes[0].source.dtype)), int(annotations[DEPTH])

        grouped = "group" in own_loops(sch, store)
        (channel,) = loops_along(sch, store, "channel")
        per_group = extent(sch, channel) // side

        # 2. Cut the result into tiles; tasks of several tiles are divided among the cores.
        size = down, across, channels
        tasks, at, pixels = _cut(sch, store, size, rows_first, blocks == 1)
        parallel_if_worth(sch, tasks, machine, work)

        # 3. Sum up a tile in registers: all of the reduction, or a block of it.
        stored, sums, block = pixels, None, None
        if blocks > 1:
            sums = sch.get_sblock(SUMS)
            at, block, stored = _block_by_block(sch, sums, tasks)
        sch.compute_at(anchor, at, preserve_unit_loops=True)
        lanes = tiles.lanes_for(channels, machine, bits)
        # With several groups, vectors of inputs are contiguous only for a known channel.
        most = lanes if side > 1 else CONVOLUTION.few_channels
        if depth % inputs == 0 and inputs <= most:
            sch.unroll(*loops_along(sch, anchor, "input"))
        whole = depth, "block"
        window = "window_y", "window_x", "input"
        along = keep_in_registers(sch, anchor, stored, machine, ("y", ROW), window, whole)
        if sums is not None and block is not None:
            within = "y_tile", "x_tile"
            fetch_ahead(sch, anchor, along, prod(axes.extents(*within)), within)
            initial = sch.get_loops(sch.decompose_reduction(sums, block))
            for lane in (initial[-1], pixels[-1]):
                vectorize(sch, lane, lanes)

        # 4. Schedule what was not fused: padding where a task reads it, or as loops of its own.
        near = rows_first and not grouped
        if side > 1:  # a tile that crosses from one group to the next sees no constant share
            crosses = 0 not in (channels % per_group, per_group % channels)
            near = inputs >= CONVOLUTION.few_channels and not crosses
        if find(sch, PAD) is not None and near:
            _pad_nearby(sch, tasks, machine)
        elif find(sch, PAD) is not None:
            rest = [PAD, *rest]
        for name in rest:
            schedule_block(sch, sch.get_sblock(name), machine, work)
        return sch


def _cut(
    sch: s_tir.Schedule,
    store: SBlockRV,
    tile: tuple[int, int, int],
    rows_first: bool,
    whole: bool,
) -> tuple[LoopRV, LoopRV, list[LoopRV]]:
    """Cut the store into tasks, and these into tiles of rows × columns × channels.

    Returns the loops over tasks and, for sums of the `whole` reduction, over tiles; and those of a
    tile.
    """
    b, y, x, c = loops_along(sch, store, *PIXEL)
    group = [loop for name, loop in own_loops(sch, store).items() if name not in PIXEL]
    (yo, yi), (xo, xi), (co, ci) = (
        sch.split(loop, [None, size]) for loop, size in zip((y, x, c), tile, strict=True)
    )
    outer, inner = [b, *group], [yi, xi, ci]
    if is_symbolic(sch, yo):  # one image is no factor that TVM would divide rows by
        outer = [loop for loop in outer if is_symbolic(sch, loop) or extent(sch, loop) > 1]
    if is_compound(sch, yo):
        # TVM multiplies `size + 3` out, and then finds no quotient by it: nothing between images
        # and rows is fused with them, and no known number of images either.
        images = [b] if is_symbolic(sch, b) else []
        sch.reorder(b, yo, *group, co, xo, *inner)
        return fuse(sch, [*images, yo]), xo, inner
    if rows_first:
        sch.reorder(*outer, yo, co, xo, *inner)
        return fuse(sch, [*outer, yo]), xo, inner
    sch.reorder(*outer, co, yo, xo, *inner)
    if not whole:
        return fuse(sch, [*outer, co]), xo, inner
    if extent(sch, yo) > 1:
        return fuse(sch, [*outer, co, yo]), xo, inner
    tasks = fuse(sch, [*outer, co, yo, xo])  # threads divide a single row
    return tasks, tasks, inner


def _pad_nearby(sch: s_tir.Schedule, rows: LoopRV, machine: Microarchitecture) -> None:
    """Pad the few rows that the window sees where they are used, in L1."""
    padding = sch.get_sblock(PAD)
    sch.compute_at(padding, rows, preserve_unit_loops=True)
    along, lanes = sch.get_loops(padding)[-1], machine.lanes(output_bits(sch, padding))
    if not mark_pieces(sch, padding, along, lanes):
        vectorize(sch, along, lanes, unroll=False)


def _block_by_block(
    sch: s_tir.Schedule, sums: SBlockRV, channels: LoopRV
) -> tuple[LoopRV, LoopRV, list[LoopRV]]:
    """Multiply all pixels with one block of input channels after the other.

    Returns the loop that holds a tile of pixels, the loop over blocks, and those of a tile.
    """
    sch.compute_at(sums, channels, preserve_unit_loops=True)
    nest = loops_along(sch, sums, "block", "y_tile", "x_tile", "y", ROW, LANE)
    sch.reorder(*nest)
    block, _, at, *tile = nest
    return at, block, tile
