"""Convolution to fewer channels than a vector has lanes, as one product and shifted sums.

The direct kernel has output channels in the lanes, and three of them (a picture) leave most of a
vector empty. Here each pixel is multiplied by the weights of all places of the window at once, 27
columns for 3 × 3 × 3, and a second pass adds up what the window of each result covers ("kn2row",
Vasudevan, Anderson and Gregg 2017, https://arxiv.org/abs/1704.04428).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import add
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.microarchitecture import Microarchitecture


def is_faster(convolution: Convolution, machine: Microarchitecture) -> bool:
    """Whether the product and the sums take fewer multiply-adds than empty lanes do."""
    outputs, *window, inputs = convolution.kernel
    lanes = machine.lanes(convolution.bits)
    columns = prod(window) * outputs
    if (
        outputs >= lanes
        or convolution.groups > 1
        or convolution.planar
        or convolution.window.strides != (1, 1)
        or convolution.dtype not in ("float32", "float64")  # partial sums would be rounded
    ):
        return False
    # Sums are scalar: each takes as long as a vector.
    split = -(-columns // lanes) * lanes * inputs + columns * lanes
    return split < lanes * prod(window) * inputs


def as_product(builder: relax.BlockBuilder, convolution: Convolution, weight: Expr) -> Expr:
    """Emit the weights of a convolution of single pixels, ``[place · channel, 1, 1, input]``."""
    outputs, _, width, inputs = convolution.kernel

    def arrange(kernel: te.Tensor) -> te.Tensor:
        def element(column: tirx.Var, _y: tirx.Var, _x: tirx.Var, i: tirx.Var) -> Expr:
            place, channel = column // outputs, column % outputs
            return kernel[channel, place // width, place % width, i]

        shape = (prod(convolution.kernel[:3]), 1, 1, inputs)
        return te.compute(shape, element, name="arrange")

    return builder.emit(builder.call_te(arrange, weight, primfunc_name_hint="pack_few_outputs"))


def sums(convolution: Convolution, out: Sequence[Any], products: te.Tensor) -> te.Tensor:
    """For each result, the sum of the products that its window covers.

    Parameters
    ----------
    out
        The shape of the result in plain variables and numbers.
    """
    outputs, height, width, _ = convolution.kernel
    _, rows, columns, _ = products.shape
    top, left, *_ = convolution.window.padding

    def element(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
        def product(ry: int, rx: int) -> Expr:
            row, column = convolution.window.at(y, x, ry, rx)
            row, column = row - top, column - left
            inside = tirx.all(row >= 0, row < rows, column >= 0, column < columns)
            place = products[b, row, column, (ry * width + rx) * outputs + c]
            return tirx.if_then_else(inside, place, tirx.const(0, products.dtype))

        return reduce(add, (product(ry, rx) for ry in range(height) for rx in range(width)))

    return te.compute(out, element, name="sums")
