"""Convolution of images of any size as a matrix product ("implicit GEMM").

The rows of the left-hand side are pixels of the result, numbered through all rows of all images;
its columns are the places of the window and the input channels. It is never stored: the kernel
reads it from the image. So tiles are as full at a width of 7 as at one of 100, and everything that
products of any number of rows use (short last tiles, prefetches) applies here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import WINOGRAD
from tvmify.compiler.kernels.common.legalizing import accumulator
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.windows import Window, pad
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.kernels.matmul.planning import workload
from tvmify.compiler.kernels.matmul.rows import unflatten
from tvmify.compiler.kernels.matmul.template import PAD, Product
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of


@dataclass(frozen=True, kw_only=True)
class Implicit(Product):
    """One convolution without groups, as a product of windows with packed weights.

    A block of the reduction is a part of the channels at one place of the window.
    """

    window: Window

    hint = "conv2d"

    @classmethod
    def of_convolution(
        cls, convolution: Convolution, out: tuple[Any, ...], machine: Microarchitecture
    ) -> Implicit:
        """Choose how to cut; `out` is its result in plain variables."""
        channels, window = convolution.kernel[3], convolution.window
        rows, depth = sizes.product(out[:3]), prod(window.size) * channels
        product = Product.of((rows, depth), (depth, out[3]), out, convolution.dtype, machine)
        most = min(product.plan.depth, channels)
        block = next(n for n in range(most, 0, -1) if channels % n == 0)
        known = {field.name: getattr(product, field.name) for field in fields(product)}
        return cls(**known | {"plan": replace(product.plan, depth=block)}, window=window)

    @property
    def packs(self) -> tuple[Callable[[te.Tensor], te.Tensor], ...]:
        """The function that packs the weights."""
        return (self.pack_kernel,)

    @property
    def channels(self) -> int:
        """Input channels."""
        return self.left[-1] // prod(self.window.size)

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes for images of the likely sizes."""
        work = workload((1, self.rows, self.columns, self.depth), self.dtype)
        bits = bits_of(accumulator(self.dtype))
        products = plans.nanoseconds(work, self.plan, machine, bits, 1)
        return max(products, self.depth * self.columns * bits // 8 * WINOGRAD.weight_byte)

    def pack_kernel(self, kernel: te.Tensor) -> te.Tensor:
        """Lay out OHWI weights as `Product.pack` does."""

        def element(k: tirx.Var, o: tirx.Var) -> Expr:
            place, channel = k // self.channels, k % self.channels
            across = self.window.size[1]
            return kernel[o, place // across, place % across, channel]

        return self.pack(te.compute(self.right, element, name="transposed"))

    def kernel(self, image: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """The convolution of an NHWC image with packed weights."""
        return self._tiled(pad(image, self.window, self.out[1:3], PAD), packed)

    def element(self, left: te.Tensor, at: Sequence[Expr], block: Expr, step: Expr) -> Expr:
        """Return a channel of a pixel of a window."""
        (row,) = at
        b, y, x = unflatten(row, self.out[:3])
        in_place, across = self.channels // self.plan.depth, self.window.size[1]
        place, channel = block // in_place, block % in_place * self.plan.depth + step
        y, x = self.window.at(y, x, place // across, place % across)
        return self.step(lambda channel: left(b, y, x, channel), channel)
