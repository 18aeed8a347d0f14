"""Transposed convolution of NHWC images, as plain convolutions of stride 1.

A transposed convolution of stride s computes each output pixel from the kernel positions that are
congruent to it modulo s. So the s × s pixels of a block of the output are s × s plain convolutions
of the same few input pixels, each with every s-th position of the kernel ("sub-pixel convolution",
Shi et al. 2016). Those with as many positions are one convolution with as many times the output
channels: all of them if the kernel is a multiple of the stride, four kinds otherwise. No zeros are
inserted, and none multiplied, unless sizes vary or the kernel is smaller than the stride. If kernel
and stride are equal, it is a matrix product. The channels are then rearranged to pixels by a pass
that fuses with the operators after it: bias, activation, and the concatenation of a U-Net, which
copies anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import call_template, plain
from tvmify.compiler.kernels.conv import rule as conv2d
from tvmify.compiler.kernels.conv.windows import shapes_of
from tvmify.compiler.sizes import Size


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.conv2d_transpose`` on NHWC images and IOHW weights, undilated, ungrouped."""
    attributes = call.attrs
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    data, weight = call.args
    image, kernel, out = shapes_of(call, *call.args)
    dilation = [int(step) for step in attributes.dilation]
    if layouts != ("NHWC", "IOHW", "NHWC") or int(attributes.groups) != 1 or max(dilation) > 1:
        return plain(builder, call)
    if 0 in sizes.hints([*image, *kernel, *out]):
        return plain(builder, call)
    axes = [
        Axis(*sizes, range(sizes[2]))
        for sizes in zip(
            image[1:3],
            kernel[2:],
            (int(step) for step in attributes.strides),
            (int(p) for p in list(attributes.padding)[:2]),
            out[1:3],
            strict=True,
        )
    ]
    parts = list(itertools.product(*(axis.parts() for axis in axes)))
    margins = [margin for part in parts for axis in part for margin in (axis.before, axis.after)]
    if not sizes.is_static(*margins):
        return plain(builder, call)
    of_any_size = not sizes.is_static(*image[1:3])
    if of_any_size and min(margins) < 0:
        return plain(builder, call)

    inside = sizes.Variables().of(map(sizes.simplified, out))
    blocks = [builder.emit(_convolution(builder, data, weight, part)) for part in parts]
    if axes[0].stride == axes[1].stride == 1:
        return blocks[0]

    def place(*blocks: te.Tensor) -> te.Tensor:
        return _place(blocks, inside, parts)

    if of_any_size:
        return call_template(builder, place, blocks, out, inside, "conv2d_transpose")
    return builder.call_te(place, *blocks, primfunc_name_hint="conv2d_transpose")


@dataclass(frozen=True)
class Axis:
    """A transposed convolution along one axis: some of the places in each block of the output.

    Attributes
    ----------
    size, out
        Pixels of the image and of the output.
    phases
        These places, of ``range(stride)``.
    """

    size: Size
    kernel: int
    stride: int
    padding: int
    out: Size
    phases: range

    def parts(self) -> list[Axis]:
        """Divide the places by how many positions of the kernel reach them."""
        more = self.kernel % self.stride
        # TVM fails at the conditions by which places of many parts are told apart, if sizes vary.
        if not sizes.is_static(self.out) or self.kernel < self.stride or more == 0:
            return [self]
        parts = [replace(self, phases=phases) for phases in (range(more), range(more, self.stride))]
        return [part for part in parts if part.first <= part.last]

    @property
    def taps(self) -> int:
        """Input pixels that an output pixel sees."""
        return len(range(self.phases.start, self.kernel, self.stride))

    @property
    def first(self) -> int:
        """The first block of the output that is not cropped away."""
        return (self.padding + self.stride - self.phases.stop) // self.stride

    @property
    def last(self) -> Size:
        """The last such block."""
        return (self.padding + self.out - 1 - self.phases.start) // self.stride

    @property
    def before(self) -> int:
        """Pixels to add before the image; less than zero: to leave out."""
        return self.taps - 1 - self.first

    @property
    def after(self) -> Any:
        """Pixels to add after it: a number, unless that depends on the size."""
        return sizes.number_or_expression(sizes.simplified(self.last - self.size + 1))

    def at(self, position: Expr) -> tuple[Expr, Expr]:
        """The block in which an output pixel lies, and its place among these phases."""
        shifted = position + self.padding
        return shifted // self.stride - self.first, shifted % self.stride - self.phases.start

    def has(self, position: Expr) -> Expr:
        """Whether an output pixel has one of these phases."""
        phase = (position + self.padding) % self.stride
        return tirx.all(phase >= self.phases.start, phase < self.phases.stop)


#: A vertical and a horizontal axis.
Part = tuple[Axis, Axis]


def _convolution(builder: relax.BlockBuilder, data: Expr, weight: Expr, part: Part) -> Expr:
    """Compute the blocks of all places that the same positions of the kernel reach."""

    def arrange(kernel: te.Tensor) -> te.Tensor:
        return _arrange(kernel, *part)

    if any(axis.before < 0 or axis.after < 0 for axis in part):
        data = _cropped(builder, data, part)
    weight = builder.emit(builder.call_te(arrange, weight, primfunc_name_hint="pack_transposed"))
    padding = [max(p, 0) for p in (*(a.before for a in part), *(a.after for a in part))]
    convolution = relax.op.nn.conv2d(
        data, weight, padding=padding, data_layout="NHWC", kernel_layout="OHWI"
    )
    return conv2d.legalize(builder, builder.normalize(convolution))


def _cropped(builder: relax.BlockBuilder, data: Expr, axes: Sequence[Axis]) -> Expr:
    """Leave out the pixels that no result needs."""
    image = sizes.sizes_of(data.ty.shape)
    begin = [0, *(max(-axis.before, 0) for axis in axes), 0]
    cuts = [0, *(max(-axis.after, 0) for axis in axes), 0]
    end = [size - cut for size, cut in zip(image, cuts, strict=True)]
    if sizes.is_static(image[0]):
        return builder.emit(builder.call_te(topi.strided_slice, data, begin, end))
    ranges = begin[1:], end[1:], [1, 1, 1], [1, 2, 3]  # not along the batch
    return builder.emit(builder.call_te(topi.strided_slice, data, *ranges))


def _arrange(kernel: te.Tensor, vertical: Axis, horizontal: Axis) -> te.Tensor:
    """Turn IOHW weights into OHWI weights of all phases: ``[phase, phase, channel]`` is O."""
    inputs, channels = (int(size) for size in kernel.shape[:2])

    def element(o: tirx.Var, y: tirx.Var, x: tirx.Var, i: tirx.Var) -> Expr:
        phase, channel = o // channels, o % channels
        down, right = phase // len(horizontal.phases), phase % len(horizontal.phases)
        row = vertical.phases.start + down + vertical.stride * (vertical.taps - 1 - y)
        column = horizontal.phases.start + right + horizontal.stride * (horizontal.taps - 1 - x)
        inside = tirx.all(row < vertical.kernel, column < horizontal.kernel)
        return tirx.if_then_else(
            inside, kernel[i, channel, row, column], tirx.const(0, str(kernel.dtype))
        )

    phases = len(vertical.phases) * len(horizontal.phases)
    shape = (phases * channels, vertical.taps, horizontal.taps, inputs)
    return te.compute(shape, element, name="arrange")


def _place(blocks: Sequence[te.Tensor], out: Sequence[Any], parts: Sequence[Part]) -> te.Tensor:
    def element(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
        result: Any = None
        for block, (vertical, horizontal) in zip(blocks, parts, strict=True):
            row, down = vertical.at(y)
            column, right = horizontal.at(x)
            pixel = block[b, row, column, (down * len(horizontal.phases) + right) * out[3] + c]
            inside = tirx.all(vertical.has(y), horizontal.has(x))
            result = pixel if result is None else tirx.if_then_else(inside, pixel, result)
        return result

    n = sizes.number_or_expression(blocks[0].shape[0])
    return te.compute((n, *out[1:]), element, name="place")
