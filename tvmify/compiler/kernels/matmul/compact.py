"""Compact (24-bit) weights, for products that are bound by memory. A product of one row reads each
weight once, and a core multiplies faster than memory delivers. So 32 bits become 24: a fraction of
the largest weight among its neighbours, those of the same row in the same panel, which share one
scale. That is block floating point, as in J. H. Wilkinson, Rounding Errors in Algebraic Processes
(1963). Each weight is off by at most 2^-22 of its largest neighbour (of 2^-120, if that is less),
four times what float32 rounds that one's product with an activation by, and mostly by less than
half of it: sums over a row are hardly less exact than before.

In a register, a fraction f is the float32 3 + f, all of whose other bits are known: they are left
out, and put back by one OR and one subtraction. The 24th bit, spread over those of the exponent,
makes it NaN or, with all others zero, minus infinity; a scale below zero makes that infinity. Where
a row of a panel has both, minus infinity becomes NaN.

Four vectors of fractions lie in three vectors of words: the lower bytes of each are one of the
first three, and the upper bytes of all three are the fourth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler.costs import COMPACT
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.common.legalizing import product_weight_bytes
from tvmify.compiler.microarchitecture import Microarchitecture

#: Vectors of a tile, and the vectors of words that store them.
VECTORS, _WORDS = 4, 3
#: The float32 3; its fraction bits, which encode zero; and the mask of all fraction bits.
_THREE, _MIDDLE, _FRACTION = 3.0, 0x400000, 0x7FFFFF
#: The fraction of the largest weight: 3 + 1 would have another exponent.
_LARGEST = 1 - 2.0**-22
#: The bits that finite fractions omit, and the code of NaN, one more than that of minus infinity.
_EXPONENT, _NAN = 0x40000000, 0x800001
#: The smallest scale, to avoid divisions by zero; and the largest float32.
_LEAST, _MOST = 2.0**-120, (2 - 2.0**-23) * 2.0**127


def applies(
    builder: relax.BlockBuilder,
    rows: int,
    weights: Sequence[int],
    dtype: str,
    machine: Microarchitecture,
) -> bool:
    """Whether a product with this number of rows has compact weights ``[…, depth, columns]``.

    Only if the weights do not fit in caches, and not with ``accuracy="strict"``.
    """
    # The other registers hold the weights of a step, the row's activation, and constants.
    fits = rows * VECTORS <= machine.vector_registers * COMPACT.sums
    wide = machine.vector_bits >= COMPACT.narrowest
    nearby = machine.keeps(4 * prod(weights))
    width, columns = VECTORS * machine.lanes(), weights[-1]
    padding = _WORDS * -(-columns // width) * width > VECTORS * columns
    if dtype != "float32" or not fits or not wide or nearby or padding or choice.is_strict():
        return False
    return product_weight_bytes(builder) > COMPACT.distant


def pack(builder: relax.BlockBuilder, panels: Expr) -> list[Expr]:
    """Make panels, ``[…, columns / tile, depth, tile]``, compact: return their words and scales."""
    scales = builder.emit(builder.call_te(scales_of, panels, primfunc_name_hint="pack_scales"))
    words = builder.call_te(words_of, panels, scales, primfunc_name_hint="pack_words")
    return [builder.emit(words), scales]


def scales_of(panels: te.Tensor) -> te.Tensor:
    """Find the largest weight of each row of a panel.

    Returns
    -------
    te.Tensor
        float32 ``[…, columns / tile, depth]``, below zero where a weight is infinite.
    """
    *shape, tile = panels.shape
    zero = tirx.const(0.0, "float32")

    def largest(*row: tirx.Var) -> Expr:
        lane = te.reduce_axis((0, tile), "lane")
        weight = tirx.abs(panels(*row, lane))
        return te.max(tirx.Select(weight <= _MOST, weight, zero), axis=lane)

    def infinite(*row: tirx.Var) -> Expr:
        lane = te.reduce_axis((0, tile), "lane")
        is_infinite = panels(*row, lane) == tirx.infinity("float32")
        return te.max(is_infinite.astype("int32"), axis=lane)

    sizes = te.compute(shape, largest, name="largest")
    signs = te.compute(shape, infinite, name="infinite")

    def scale(*row: tirx.Var) -> Expr:
        size = tirx.min(tirx.max(sizes(*row), _LEAST) / _LARGEST, _MOST)
        return tirx.Select(signs(*row) > 0, -size, size)

    return te.compute(shape, scale, name="scales")


def words_of(panels: te.Tensor, scales: te.Tensor) -> te.Tensor:
    """Write the weights of panels as fractions of their scales.

    Returns
    -------
    te.Tensor
        int32 ``[…, columns / tile, depth, 3 * tile / 4]``.
    """
    *shape, tile = (int(size) for size in panels.shape)
    lanes = tile // VECTORS

    def code(*index: Expr) -> Expr:
        weight, scale = panels(*index), scales(*index[:-1])
        fraction = weight / scale
        bits = tirx.reinterpret("int32", tirx.min(fraction, _LARGEST) + _THREE) & _FRACTION
        # Only zero may become zero: it may be multiplied by infinity.
        upwards = tirx.Select(scale > 0, weight, -weight)
        least = _MIDDLE + (upwards > 0).astype("int32") - (upwards < 0).astype("int32")
        finite = tirx.Select(bits == _MIDDLE, least, bits)
        special = _NAN - (fraction == -tirx.infinity("float32")).astype("int32")
        return tirx.Select(tirx.abs(fraction) <= 1, finite, special)

    def word(*index: tirx.Var) -> Expr:
        *row, i = index
        fourth = code(*row, _WORDS * lanes + i % lanes)
        byte = (fourth >> (8 * (i // lanes)).astype("int32")) & 0xFF
        return code(*index) | (byte << 24)

    return te.compute((*shape, _WORDS * lanes), word, name="words")


def unpack(words: te.Tensor, row: Sequence[Expr], lane: Expr) -> Expr:
    """Return a weight of a row of a panel, in units of its scale."""
    lanes = int(words.shape[-1]) // _WORDS

    def part(number: Expr | int) -> Expr:
        return words(*row, number * lanes + lane % lanes)

    first, second, third = (part(number) for number in range(_WORDS))
    fourth = ((first >> 24) & 0xFF) | ((second >> 16) & 0xFF00) | ((third >> 8) & ~0xFFFF)
    own = (part(tirx.min(lane // lanes, _WORDS - 1)) << 8) >> 8
    code = tirx.Select(lane // lanes < _WORDS, own, fourth)
    return tirx.reinterpret("float32", code | _EXPONENT) - _THREE
