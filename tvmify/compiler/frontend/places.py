"""Formulas for indices that are known at compile time. A table of indices costs a load before each
load, and prevents fusion. Reflected and replicated borders, upsampled images and rolled rows are a
few pieces of ``slope * i + offset``, or one division.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import torch
from tvm import tirx
from tvm.ir import Expr

#: More pieces than two borders have are left to a table.
_MOST_PIECES = 4

#: Analysing longer tables would take longer than it saves.
_LONGEST = 1 << 18

Formula = Callable[[Expr], Expr]


class _Piece(NamedTuple):
    start: int
    slope: int
    offset: int


def formula(positions: list[int]) -> Formula | None:
    """Return a function from the position in a table to its entry; None if there is no formula."""
    pieces = _pieces(positions)
    if len(pieces) <= _MOST_PIECES:
        return lambda i: _choice(pieces, i)
    count = len(positions)
    step = Fraction(positions[-1] + 1, count)  # as in nearest-neighbour resizing
    if positions == [i * step.numerator // step.denominator for i in range(count)]:
        return lambda i: tirx.floordiv(i * step.numerator, step.denominator)
    return None


def formula_of(positions: torch.Tensor, extent: int) -> Formula | None:
    """Return a formula for indices along an axis; negative ones count from the end."""
    if positions.dim() != 1 or not 0 < len(positions) <= _LONGEST or positions.is_floating_point():
        return None
    if positions.dtype is torch.bool or positions.min() < -extent or positions.max() >= extent:
        return None
    return formula((positions % extent).tolist())


def border(before: Expr | int, extent: Expr | int, mirrors: bool) -> Formula:
    """Return where a padded axis of any length reads: inside, or mirrored or cut off at its ends.

    Parameters
    ----------
    before
        The width of the border before the axis; if negative, how much is cropped.
    extent
        The length of the axis.
    """

    def place(i: Expr) -> Expr:
        at, last = i - before, extent - 1
        low, high = (-at, 2 * last - at) if mirrors else (tirx.const(0, "int64"), last)
        return tirx.Select(i < before, low, tirx.Select(i < before + extent, at, high))

    return place


def _pieces(positions: list[int]) -> list[_Piece]:
    """Cut a table into runs of one slope; entries that fit two runs go to the one with slope 1."""
    slopes = [after - before for before, after in pairwise(positions)]
    pieces: list[_Piece] = []
    start = 0
    while start < len(positions) and len(pieces) <= _MOST_PIECES:
        end = start + 1
        while end < len(positions) and slopes[end - 1] == slopes[start]:
            end += 1
        if start + 1 < end < len(positions) and slopes[end - 1] == 1:
            end -= 1
        slope = slopes[start] if end - start > 1 else 0
        pieces.append(_Piece(start, slope, positions[start] - slope * start))
        start = end
    return pieces


def _choice(pieces: list[_Piece], i: Expr) -> Expr:
    *others, (_, slope, offset) = pieces
    result = i * slope + offset
    for piece, following in zip(reversed(others), reversed(pieces[1:]), strict=True):
        result = tirx.Select(i < following.start, i * piece.slope + piece.offset, result)
    return result
