"""The description of a convolution by which its kernels are chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import accumulator
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.microarchitecture import bits_of


@dataclass(frozen=True)
class Convolution:
    """A two-dimensional convolution.

    Attributes
    ----------
    image, out
        Shapes of the input and of the result, ``[n, height, width, channels]``, of which the
        channels alone are always known.
    kernel
        Shape of the weights, ``[channels, height, width, channels of a group of the input]``.
    planar
        Whether the image lies in memory as NCHW; `image` is its NHWC shape all the same.
    """

    image: tuple[Any, ...]
    kernel: tuple[int, ...]
    out: tuple[Any, ...]
    window: Window
    groups: int
    dtype: str
    planar: bool = False

    @property
    def likely(self) -> Convolution:
        """The same with a number for each size, for estimates."""
        image, out = (tuple(sizes.hints(shape)) for shape in (self.image, self.out))
        return replace(self, image=image, out=out)

    @property
    def workload(self) -> str:
        """The name under which measurements of its kernels are kept."""
        shapes = f"{list(self.image)} {list(self.kernel)}"
        return f"conv2d {shapes} {self.window} {self.groups} {self.dtype}" + " planar" * self.planar

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel of the result depends on one channel, its own."""
        return self.kernel[3] == 1 and self.groups == self.image[3] == self.kernel[0]

    @property
    def is_product(self) -> bool:
        """Whether it multiplies each pixel by one matrix."""
        return self.window.is_pointwise and self.groups == 1

    @property
    def bits(self) -> int:
        """Bits of a sum."""
        return bits_of(accumulator(self.dtype))
