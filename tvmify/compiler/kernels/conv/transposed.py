"""Transposed convolution of NHWC images, as one plain convolution of stride 1.

A transposed convolution of stride s computes each output pixel from the kernel positions that are
congruent to it modulo s. So the s × s pixels of a block of the output are s × s plain convolutions
of the same few input pixels, each with every s-th position of the kernel: one convolution with s ×
s times as many output channels. Its channels are then rearranged to pixels ("sub-pixel
convolution", Shi et al. 2016). No zeros are inserted or multiplied, except where the kernel is not
a multiple of the stride. If kernel and stride are equal, it is a matrix product. The rearrangement
is a pass that fuses with the operators after it: bias, activation, and the concatenation of a
U-Net, which copies anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    vertical, horizontal = axes = [
        Axis(*sizes)
        for sizes in zip(
            image[1:3],
            kernel[2:],
            (int(step) for step in attributes.strides),
            (int(p) for p in list(attributes.padding)[:2]),
            out[1:3],
            strict=True,
        )
    ]
    of_any_size = not sizes.is_static(*image[1:3])
    if not sizes.is_static(*(axis.after for axis in axes)):
        return plain(builder, call)
    if any(axis.before < 0 or axis.after < 0 for axis in axes):
        if of_any_size:
            return plain(builder, call)
        data = _cropped(builder, data, axes)

    inside = sizes.Variables().of(map(sizes.simplified, out))

    def arrange(kernel: te.Tensor) -> te.Tensor:
        return _arrange(kernel, vertical, horizontal)

    def place(blocks: te.Tensor) -> te.Tensor:
        return _place(blocks, inside, vertical, horizontal)

    weight = builder.emit(builder.call_te(arrange, weight, primfunc_name_hint="pack_transposed"))
    padding = [max(p, 0) for p in (*(a.before for a in axes), *(a.after for a in axes))]
    convolution = relax.op.nn.conv2d(
        data, weight, padding=padding, data_layout="NHWC", kernel_layout="OHWI"
    )
    blocks = conv2d.legalize(builder, builder.normalize(convolution))
    if (vertical.stride, horizontal.stride) == (1, 1):
        return blocks
    blocks = builder.emit(blocks)
    if of_any_size:
        return call_template(builder, place, [blocks], out, inside, "conv2d_transpose")
    return builder.call_te(place, blocks, primfunc_name_hint="conv2d_transpose")


@dataclass(frozen=True)
class Axis:
    """A transposed convolution along one axis."""

    size: Size
    kernel: int
    stride: int
    padding: int
    out: Size

    @property
    def taps(self) -> int:
        """Input pixels that an output pixel sees."""
        return -(-self.kernel // self.stride)

    @property
    def first(self) -> int:
        """The first block of the output that is not cropped away."""
        return self.padding // self.stride

    @property
    def last(self) -> Size:
        """The last such block."""
        return (self.padding + self.out - 1) // self.stride

    @property
    def before(self) -> int:
        """Pixels to add before the image; less than zero: to leave out."""
        return self.taps - 1 - self.first

    @property
    def after(self) -> Any:
        """Pixels to add after it: a number, unless that depends on the size."""
        return sizes.number_or_expression(sizes.simplified(self.last - self.size + 1))

    def at(self, position: Expr) -> tuple[Expr, Expr]:
        """The block in which an output pixel lies, and its place there."""
        shifted = position + self.padding
        return shifted // self.stride - self.first, shifted % self.stride


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
        row = phase // horizontal.stride + vertical.stride * (vertical.taps - 1 - y)
        column = phase % horizontal.stride + horizontal.stride * (horizontal.taps - 1 - x)
        inside = tirx.all(row < vertical.kernel, column < horizontal.kernel)
        return tirx.if_then_else(
            inside, kernel[i, channel, row, column], tirx.const(0, str(kernel.dtype))
        )

    phases = vertical.stride * horizontal.stride
    shape = (phases * channels, vertical.taps, horizontal.taps, inputs)
    return te.compute(shape, element, name="arrange")


def _place(blocks: te.Tensor, out: Sequence[Any], vertical: Axis, horizontal: Axis) -> te.Tensor:
    def element(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
        row, down = vertical.at(y)
        column, right = horizontal.at(x)
        return blocks[b, row, column, (down * horizontal.stride + right) * out[3] + c]

    n = sizes.number_or_expression(blocks.shape[0])
    return te.compute((n, *out[1:]), element, name="place")
