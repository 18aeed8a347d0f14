"""Depthwise convolution of images and volumes, with channels in the vector lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.legalizing import accumulator
from tvmify.compiler.kernels.conv.channelwise import Channelwise, choose, slide
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

#: Name of the block that accumulates.
TILE = "depthwise_tile"
_BLOCKS = ("depthwise_pad", TILE, "depthwise_store")

Template = tuple[Callable[[te.Tensor, te.Tensor], te.Tensor], Callable[[te.Tensor], te.Tensor]]


def template(
    image: Sequence[Size],
    out: tuple[Any, ...],
    window: Window,
    dtype: str,
    machine: Microarchitecture,
    slices: int = 1,
) -> Template:
    """Return the kernel, which takes the image and packed weights, and the packing of OHWI weights.

    Packed weights are ``[channels / lanes, slices * height, width, lanes]``, padded with zeros.

    Parameters
    ----------
    slices
        How many images, one after the other, each image of the result is a sum over: those slices
        of a volume that the kernel sees. The weights have a window for each, from top to bottom.
    """
    channels, sums = out[-1], accumulator(dtype)
    lanes = tiles.lanes_for(channels, machine, bits_of(sums))
    tall, wide = window.size
    # The weights of the window stay in registers as well.
    held = min(tall * wide, machine.vector_registers // 2)
    cut = choose("depthwise", image, out, window, dtype, machine.accumulators - held)

    def pack(weight: te.Tensor) -> te.Tensor:
        def element(block: tirx.Var, y: tirx.Var, x: tirx.Var, lane: tirx.Var) -> Expr:
            channel = block * lanes + lane
            if channels % lanes == 0:
                return weight[channel, y, x, 0].astype(sums)
            # Read unconditionally, since branches for each lane of each block keep LLVM busy.
            value = weight[tirx.min(channel, channels - 1), y, x, 0].astype(sums)
            return tirx.Select(channel < channels, value, tirx.const(0, sums))

        shape = (-(-channels // lanes), slices * tall, wide, lanes)
        return te.compute(shape, element, name="depthwise_pack")

    def kernel(image: te.Tensor, packed: te.Tensor) -> te.Tensor:
        def combine(
            pixel: Expr, block: tirx.Var, place: list[tirx.IterVar], lane: tirx.Var
        ) -> Expr:
            *behind, ry, rx = place
            row = behind[0] * tall + ry if behind else ry
            return te.sum(pixel.astype(sums) * packed[block, row, rx, lane], axis=place)

        return slide(
            image,
            window,
            out,
            _BLOCKS,
            machine,
            element_bits=bits_of(sums),
            border=0.0,
            combine=combine,
            finish=lambda result, y, x: result.astype(dtype),
            cut=cut,
            slices=slices,
        )

    return kernel, pack


class Depthwise(Channelwise):
    """The rule of functions made by `template`."""

    name = "depthwise"
    blocks = _BLOCKS
    anchors = frozenset({TILE})
