"""Reductions in blocks of one length, of which the last has less to add up.

Templates describe all blocks alike: the last would read past the end. Its loop ends earlier here,
which no schedule can say. Padding with zeros would be no way out: a zero times infinity is NaN.
"""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.axes import Axes
from tvmify.compiler.kernels.common.rewriting import rewrite_body

#: Annotation of the loop along a block: the length of the whole reduction, and which iteration
#: variable numbers the blocks.
_LENGTH = "tvmify.length"


def end_with(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV, length: int, blocks: str) -> None:
    """Ask `shorten_last_blocks` to end this loop, along a block, with the whole reduction.

    Parameters
    ----------
    block
        The tile of sums.
    loop
        The innermost loop along the reduction, around a tile of sums.
    length
        Of the whole.
    blocks
        The axis of the tile that numbers the blocks of the reduction.
    """
    if length % int(sch.get(loop).extent):
        sch.annotate(loop, _LENGTH, [length, Axes.of(sch.get(block)).position(blocks)])


def shorten_last_blocks(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """End the loops that `end_with` marked in time."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or _LENGTH not in stmt.annotations:
            return None
        annotations = dict(stmt.annotations)
        length, number = (int(value) for value in annotations.pop(_LENGTH))  # type: ignore[attr-defined]
        tile = stmt.body
        while isinstance(tile, tirx.For):
            tile = tile.body
        left = length - tile.iter_values[number] * stmt.extent
        return tirx.For(
            stmt.loop_var,
            stmt.min,
            tirx.min(stmt.extent, left),
            stmt.kind,
            stmt.body,
            annotations=annotations,
        )

    return rewrite_body(function, visit)
