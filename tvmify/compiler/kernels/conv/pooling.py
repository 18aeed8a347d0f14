"""Maximum and average pooling of NHWC images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.legalizing import accumulator, call_template, plain
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.conv.channelwise import (
    Channelwise,
    Cut,
    choose,
    slide,
)
from tvmify.compiler.kernels.conv.windows import Window, shapes_of
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of

_BLOCKS = ("pool_pad", "pool_tile", "pool_store")
#: The most pixels of a tile of maxima: LLVM takes seconds for a wider tile of NaN-keeping maxima,
#: which is no faster.
_MAXIMA = 8


def legalize_max(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.max_pool2d``; NaN is greater than any number, as in PyTorch."""
    dtype = str(call.ty.dtype)
    wide = accumulator(dtype)  # TVM has no isnan of bfloat16

    def describe(
        window: Window, cut: Cut, machine: Microarchitecture, out: tuple[Any, ...]
    ) -> Callable[[te.Tensor], te.Tensor]:
        greatest = te.comm_reducer(
            _greater, lambda kind: tirx.const(-math.inf, str(kind)), name="greatest"
        )
        return lambda image: slide(
            image,
            window,
            out,
            _BLOCKS,
            machine,
            element_bits=bits_of(wide),
            border=-math.inf,
            combine=lambda pixel, block, place, lane: greatest(pixel.astype(wide), axis=place),
            finish=lambda result, y, x: result.astype(dtype),
            cut=cut,
        )

    # Minus infinity never exceeds the other elements of a window.
    return _legalize(builder, call, describe, "max_pool2d", Window.sees_nearest, most=_MAXIMA)


def legalize_average(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.avg_pool2d``."""
    dtype = str(call.ty.dtype)
    sums = accumulator(dtype)

    def describe(
        window: Window, cut: Cut, machine: Microarchitecture, out: tuple[Any, ...]
    ) -> Callable[[te.Tensor], te.Tensor]:
        def divide(image: te.Tensor, result: Expr, y: tirx.Var, x: tirx.Var) -> Expr:
            height, width = sizes.sizes_of(image.shape[1:3])
            rows = _count(y, 0, window, height, bool(call.attrs.count_include_pad))
            columns = _count(x, 1, window, width, bool(call.attrs.count_include_pad))
            return (result / (rows * columns).astype(sums)).astype(dtype)

        return lambda image: slide(
            image,
            window,
            out,
            _BLOCKS,
            machine,
            element_bits=bits_of(sums),
            border=0.0,
            combine=lambda pixel, block, place, lane: te.sum(pixel.astype(sums), axis=place),
            finish=partial(divide, image),
            cut=cut,
        )

    return _legalize(builder, call, describe, "avg_pool2d", Window.stays_inside)


def _legalize(
    builder: relax.BlockBuilder,
    call: Call,
    describe: Callable[..., Callable[[te.Tensor], te.Tensor]],
    hint: str,
    needs_no_border: Callable[[Window, Sequence[int], Sequence[int]], bool],
    most: int | None = None,
) -> Expr:
    attributes = call.attrs
    image = call.args[0]
    if (attributes.layout, attributes.out_layout) != ("NHWC", "NHWC") or 0 in sizes.hints(
        _out(call)
    ):
        return plain(builder, call)
    dtype, machine = str(call.ty.dtype), Microarchitecture.current()
    if not dtype.startswith(("float", "bfloat")):
        return plain(builder, call)
    window = Window.of(attributes, [int(size) for size in attributes.pool_size])
    (shape, _) = shapes_of(call, image)
    whole = " with padding" if bool(attributes.count_include_pad) else ""
    registers = min(most or machine.accumulators, machine.accumulators)
    lanes = tiles.lanes_for(shape[-1], machine, bits_of(accumulator(dtype)))
    # Where the window is a loop, keeping each of its places inside takes longer than a copy.
    unrolled = math.prod(window.size) <= CONVOLUTION.unrolled_window
    whole_vectors = shape[-1] % lanes == 0
    bordered = not (unrolled and whole_vectors and needs_no_border(window, shape, _out(call)))
    cut = choose(f"{hint}{whole}", shape, _out(call), window, dtype, registers, bordered)
    inside = sizes.Variables().of(map(sizes.simplified, _out(call)))
    template = describe(window, cut, machine, inside)
    if not sizes.is_static(*_out(call)[1:]):
        return call_template(builder, template, [image], _out(call), inside, hint)
    return builder.call_te(
        template,
        image,
        primfunc_name_hint=hint,
        primfunc_attrs=Pattern.FUSIBLE.attributes,
    )


def _out(call: Call) -> tuple[Any, ...]:
    return tuple(sizes.sizes_of(call.ty.shape))


def _greater(a: Expr, b: Expr) -> Expr:
    return tirx.Select(tirx.any(a >= b, tirx.isnan(a)), a, b)


def _count(at: tirx.Var, axis: int, window: Window, size: int, with_padding: bool) -> Expr:
    """How many places of the window count, at an output row or column."""
    before, after = window.padding[axis], window.padding[axis + 2]
    start = at * window.strides[axis]
    end = start + window.size[axis]
    if with_padding:  # rows beyond the padding, added by ceil_mode, never count
        return tirx.min(end, size + before + after) - start
    return tirx.min(end, size + before) - tirx.max(start, before)


class Pooling(Channelwise):
    """The rule of functions made by the legalizers above."""

    name = "pooling"
    blocks = _BLOCKS
    anchors = frozenset({_BLOCKS[1]})
