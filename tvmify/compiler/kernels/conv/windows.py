"""The window of a convolution or pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.sizes import Size
from tvmify.errors import UnsupportedOperator

#: The axes of an NHWC image in NCHW order.
PLANAR = (0, 2, 3, 1)
#: The axes of an NCHW image in NHWC order.
NCHW = (0, 3, 1, 2)
#: In the names of operators that slide a window over images.
_SLIDING = ("conv", "pool")


@dataclass(frozen=True)
class Window:
    """Size, stride, dilation and padding, each as (vertical, horizontal).

    Attributes
    ----------
    padding
        Rows or columns added (top, left, bottom, right).
    """

    size: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]

    @classmethod
    def of(cls, attributes: Any, size: Sequence[int]) -> Window:
        """Read the attributes of an operator, which may give one or two paddings for four."""
        padding = [int(p) for p in attributes.padding]
        if len(padding) < 4:
            padding = [padding[0], padding[-1]] * 2
        strides = tuple(int(s) for s in attributes.strides)
        dilation = tuple(int(d) for d in attributes.dilation)
        return cls(
            (int(size[0]), int(size[1])),
            (strides[0], strides[-1]),
            (dilation[0], dilation[-1]),
            (padding[0], padding[1], padding[2], padding[3]),
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether each result depends on one pixel of the image."""
        return self.size == (1, 1) and not any(self.padding)

    def reach(self, pixels: tuple[Size, Size]) -> tuple[Size, Size]:
        """How many rows and columns of the input these rows and columns of output depend on."""
        vertical, horizontal = (
            (count - 1) * stride + (size - 1) * dilation + 1
            for count, stride, size, dilation in zip(
                pixels, self.strides, self.size, self.dilation, strict=True
            )
        )
        return vertical, horizontal

    def results(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the result for an image of this height and width."""
        top, left, bottom, right = self.padding
        padded = (image[0] + top + bottom, image[1] + left + right)
        reach = self.reach((1, 1))
        tall, wide = (
            (extent - seen) // stride + 1
            for extent, seen, stride in zip(padded, reach, self.strides, strict=True)
        )
        return tall, wide

    def stays_inside(self, image: Sequence[int], out: Sequence[int]) -> bool:
        """Whether no window leaves an image ``[n, height, width, channels]``."""
        reach = self.reach((out[1], out[2]))
        fits = (sizes.holds(r <= size) for r, size in zip(reach, image[1:3], strict=True))
        return not any(self.padding[:2]) and all(fits)

    def sees_nearest(self, image: Sequence[int], out: Sequence[int]) -> bool:
        """Whether each window that leaves the image also contains the nearest pixel inside."""
        starts = [
            before < size and sizes.holds((count - 1) * stride - before < extent)
            for before, size, count, stride, extent in zip(
                self.padding[:2], self.size, out[1:3], self.strides, image[1:3], strict=True
            )
        ]
        return self.dilation == (1, 1) and all(starts)

    def at(self, y: Expr, x: Expr, ry: Expr, rx: Expr) -> tuple[Expr, Expr]:
        """Where in the padded input an output pixel finds a place of the window."""
        return (
            y * self.strides[0] + ry * self.dilation[0],
            x * self.strides[1] + rx * self.dilation[1],
        )


def shapes_of(call: Call, *operands: Expr) -> tuple[list[Any], ...]:
    """Return the shapes of some operands and of the result of an operator on images.

    Channels are never symbolic: see `refuse_unknown_channels`.
    """
    return tuple(sizes.sizes_of(x.ty.shape) for x in (*operands, call))


def refuse_unknown_channels(ir_mod: tvm.IRModule) -> None:
    """Refuse a program that slides windows over images of a symbolic number of channels.

    Raises
    ------
    UnsupportedOperator
        It does.
    """
    for _, function in ir_mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        for binding in (b for block in function.body.blocks for b in block.bindings):
            call = binding.value
            name = call.op.name if isinstance(call, Call) and hasattr(call.op, "name") else ""
            if not name.startswith("relax.nn.") or not any(k in name for k in _SLIDING):
                continue
            shapes = shapes_of(call, *call.args)
            channels = [shape[1] for shape in shapes]
            if not sizes.is_static(*channels):
                raise UnsupportedOperator([name], "the number of channels must be static")


def pad(
    image: te.Tensor,
    window: Window,
    pixels: tuple[Size, Size],
    name: str,
    value: float = 0.0,
    channels: int | None = None,
    planar: bool = False,
    copied: bool = False,
) -> te.Tensor:
    """Pad an NHWC image so that the windows of these output rows and columns lie within it.

    Parameters
    ----------
    pixels
        Output rows and columns, rounded up to whole tiles.
    value
        What the border holds.
    channels
        Channels to pad to; None leaves them.
    planar
        Whether the image, and what is returned, is NCHW.
    copied
        Whether it is a copy even if nothing needs to be added.

    Returns
    -------
    padded
        Otherwise the image itself when nothing needs to be added.
    """
    shape: list[Any] = sizes.sizes_of(image.shape)
    n, height, width, own = (shape[axis] for axis in (PLANAR if planar else range(4)))
    channels = channels or own
    top, left = window.padding[:2]
    tall, wide = window.reach(pixels)
    if sizes.is_static(tall, wide):
        tall, wide = max(tall, height + top), max(wide, width + left)
    if not copied and sizes.same_shape((tall, wide, channels), (height, width, own)):
        return image
    border = tirx.const(value, str(image.dtype))

    def element(*place: tirx.Var) -> Expr:
        b, y, x, c = (place[axis] for axis in (PLANAR if planar else range(4)))
        inside = [y >= top, y < height + top, x >= left, x < width + left]
        if channels > own:
            inside.append(c < own)
        pixel = (b, c, y - top, x - left) if planar else (b, y - top, x - left, c)
        return tirx.if_then_else(tirx.all(*inside), image(*pixel), border)

    whole = (n, channels, tall, wide) if planar else (n, tall, wide, channels)
    return te.compute(whole, element, name=name)


def continued(image: te.Tensor, window: Window, pixels: tuple[int, int]) -> te.Tensor:
    """Extend an NHWC image past its border with the nearest pixel.

    It has as many rows and columns as what `pad` returns, but is not a copy: reading it reads the
    image.
    """
    n, height, width, channels = sizes.sizes_of(image.shape)
    top, left = window.padding[:2]

    def element(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
        row = tirx.max(tirx.min(y - top, height - 1), 0)
        column = tirx.max(tirx.min(x - left, width - 1), 0)
        return image(b, row, column, c)

    return te.compute((n, *window.reach(pixels), channels), element, name="continued")
