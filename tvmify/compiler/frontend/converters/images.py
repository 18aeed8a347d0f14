"""Convolutions of images ``[batch, channels, height, width]``, which have schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tvm import relax

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


class Steps(NamedTuple):
    """How a kernel moves along each axis of a volume, or of an image."""

    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]

    def along(self, axis: int) -> tuple[int, int, int, int]:
        """Return stride, dilation, and the padding before and after, of an axis."""
        return self.stride[axis], self.dilation[axis], self.before[axis], self.after[axis]

    def without(self, axis: int) -> Steps:
        """Return those along the other axes."""
        return Steps(*(values[:axis] + values[axis + 1 :] for values in self))


def convolve(
    importer: Importer, x: relax.Expr, weight: relax.Expr, steps: Steps, groups: int
) -> relax.Expr:
    """Emit a convolution of images."""
    return importer.emit(
        relax.op.nn.conv2d(
            x,
            weight,
            strides=steps.stride,
            padding=[*steps.before, *steps.after],
            dilation=steps.dilation,
            groups=groups,
        )
    )


def transposed(
    importer: Importer,
    x: relax.Expr,
    weight: relax.Expr,
    stride: list[int],
    padding: list[int],
    extra: list[int],
) -> relax.Expr:
    """Emit a transposed convolution of images, without groups and dilation."""
    return importer.emit(
        relax.op.nn.conv2d_transpose(
            x, weight, strides=stride, padding=[*padding, *padding], output_padding=extra
        )
    )
