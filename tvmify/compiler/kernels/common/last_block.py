"""Reductions in blocks of one length, of which the last may be shorter. Templates describe all
blocks alike, so that the last one would read past the end. Here its loop ends earlier, which no
schedule can express. Padding with zeros would be wrong: zero times infinity is NaN.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.axes import Axes
from tvmify.compiler.kernels.common.bounds import size_of, written
from tvmify.compiler.kernels.common.rewriting import rewrite_loops
from tvmify.compiler.sizes import Size

#: Annotation of the loop along a block: the length of the whole reduction, and which iteration
#: variable numbers the blocks.
_LENGTH = "tvmify.length"
#: Annotation of a block that would read past the end, unless its rule calls `end_with`.
_OPEN = "tvmify.open"


def open_ended(length: Size, block: int) -> dict[str, bool]:
    """Return the ``attrs`` of a ``te.compute`` of blocks of a reduction, the last of them shorter.

    No other rule than that of its template may schedule what has them.
    """
    return {} if isinstance(length, int) and length % block == 0 else {_OPEN: True}


def is_open_ended(function: tirx.PrimFunc) -> bool:
    """Whether a function has a block that reads past the end."""
    found = []

    def look(block: s_tir.SBlock) -> None:
        if _OPEN in block.annotations:
            found.append(block)

    tvm_ffi.structural_walk(function.body, [(s_tir.SBlock, look)])
    return bool(found)


def end_with(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV, length: Size, blocks: str) -> None:
    """Ask `shorten_last_blocks` to end this loop, along a block, with the whole reduction.

    Parameters
    ----------
    block
        The tile of sums.
    loop
        The innermost loop along the reduction, around a tile of sums.
    length
        The length of the whole reduction.
    blocks
        The axis of the tile that numbers the blocks of the reduction.
    """
    if not isinstance(length, int) or length % int(sch.get(loop).extent):
        position = Axes.of(sch.get(block)).position(blocks)
        sch.annotate(loop, _LENGTH, [written(length), position])


def shorten_last_blocks(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Shorten the loops that `end_with` marked."""

    def shorten(loop: tirx.For, marks: tuple[Any, Any]) -> Stmt:
        length, number = size_of(marks[0], function), int(marks[1])
        tile = loop.body
        while isinstance(tile, tirx.For):
            tile = tile.body
        left = length - tile.iter_values[number] * loop.extent
        return tirx.For(
            loop.loop_var,
            loop.min,
            tirx.min(loop.extent, left),
            loop.kind,
            loop.body,
            annotations=loop.annotations,
        )

    return rewrite_loops(function, _LENGTH, shorten)
