"""Rows that consist of pieces, such as borders and concatenations. In a vector that spans two
pieces, TVM evaluates conditions lane by lane. Here each piece gets its own loop, in which the
conditions are constant and vectors stay whole.

So do rows of symbolic length, even if they are one piece: otherwise, each vector would check
whether the row ends within it.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.emission import vectors
from tvmify.compiler.kernels.common.loops import (
    extent,
    fuse,
    is_injective,
    is_symbolic,
    output_bits,
    parallel_if_worth,
    shared_out,
    traffic,
)
from tvmify.compiler.kernels.common.rewriting import (
    collect,
    is_if_then_else,
    rewrite_loops,
    substitute,
    with_loop_body,
    with_new_variables,
)
from tvmify.compiler.kernels.elementwise.turns import Pieces, pieces_of
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import Size

#: DenseNet-201 concatenates 49 parts. More loops were not tried.
_MOST_PIECES = 64
#: Annotation of a row: lanes, and whether threads share them.
_PIECES = "tvmify.pieces"


def split_rows(
    sch: s_tir.Schedule, block: SBlockRV, machine: Microarchitecture, work: float, alone: bool
) -> bool:
    """Schedule a nest piece by piece if its rows consist of several, or have any length; return
    whether they do.

    The block must be a nest of its own, one loop per axis.

    Parameters
    ----------
    alone
        Whether the last axis cannot be fused with the one before it.
    """
    *outer, row = sch.get_loops(block)
    lanes = machine.lanes(output_bits(sch, block))
    has_any_length = alone and is_symbolic(sch, row) and is_injective(sch, block)
    if not outer or not (has_any_length or _has_pieces(sch, block, lanes)):
        return False
    rows = fuse(sch, outer[: shared_out(sch, outer)])
    parallel_if_worth(sch, rows, machine, work)
    # Threads share the vectors of a single row.
    shared = all(extent(sch, loop) == 1 for loop in sch.get_loops(block)[:-1])
    shared &= machine.worth_threads(work, traffic(sch.mod["main"], work))
    sch.annotate(row, _PIECES, [lanes, int(shared)])
    return True


def mark_pieces(sch: s_tir.Schedule, block: SBlockRV, row: LoopRV, lanes: int) -> bool:
    """Mark a whole row of a block, wherever that is computed, if it consists of pieces."""
    whole = sch.get(block).iter_vars[-1].dom.extent
    is_whole = not is_symbolic(sch, row) and sizes.same(whole, sch.get(row).extent)
    if not is_whole or not _has_pieces(sch, block, lanes):
        return False
    sch.annotate(row, _PIECES, [lanes, 0])
    return True


def split_pieces(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split the rows that are marked: TVM's own partitions cannot be split further."""

    def split(row: tirx.For, marks: Any) -> Stmt:
        lanes, shared = map(int, marks)
        pieces = pieces_of(row.body.block)
        parts: list[Stmt] = []
        for number, (start, length) in enumerate(pieces):
            piece = _decided(row, pieces, number)
            parts += _loops(piece, start, length, lanes, bool(shared))
        return tirx.SeqStmt(parts)

    return rewrite_loops(function, _PIECES, split)


def _loops(row: tirx.For, start: Size, length: Size, lanes: int, shared: bool) -> list[Stmt]:
    """Return the vectors of one piece of a row: whole ones, then the rest by halving."""
    if isinstance(length, int):
        rest = length % lanes
        whole = [_vectors(row, start, lanes, length // lanes, shared)] if length > rest else []
        cuts = vectors(rest, lanes)
        return whole + [_vectors(row, start + length - rest + at, n, 1) for at, n in cuts]
    parts = [_vectors(row, start, lanes, tirx.floordiv(length, lanes), shared)]
    while lanes > 1:
        first = start + tirx.floordiv(length, lanes) * lanes
        lanes //= 2
        is_left = tirx.floormod(length, 2 * lanes) >= lanes
        parts.append(tirx.IfThenElse(is_left, _vectors(row, first, lanes, 1), None))
    # `ConvertSSA` does not find all variables that several of them define.
    return [with_new_variables(part) for part in parts]


def _vectors(row: tirx.For, start: Size, width: int, count: Size, shared: bool = False) -> Stmt:
    """Return some vectors of a row, one after the other or in parallel."""
    dtype, realize = str(row.loop_var.ty.dtype), row.body
    number, lane = (tirx.Var(f"{row.loop_var.name}_{i}", dtype) for i in range(2))
    zero = tirx.const(0, dtype)
    place = lane + start if sizes.is_one(count) else number * width + lane + start

    def at(expression: Expr) -> Expr:
        return substitute(expression, lambda node: place if node.same_as(row.loop_var) else None)

    values = [at(value) for value in realize.iter_values]
    body: Stmt = s_tir.SBlockRealize(values, at(realize.predicate), realize.block)
    kind = tirx.ForKind.VECTORIZED if width > 1 else tirx.ForKind.UNROLLED
    body = tirx.For(lane, zero, tirx.const(width, dtype), kind, body)
    if sizes.is_one(count):
        return body
    kind = tirx.ForKind.PARALLEL if shared else tirx.ForKind.SERIAL
    extent = tirx.const(count, dtype) if isinstance(count, int) else count
    return tirx.For(number, zero, extent, kind, body)


def _has_pieces(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> bool:
    """Whether a row has several pieces, but not too many, and not only short ones."""
    if not is_injective(sch, block):
        return False
    lengths = [sizes.hint(length) for _, length in pieces_of(sch.get(block))]
    return 1 < len(lengths) <= _MOST_PIECES and max(lengths) >= lanes


def _decided(row: tirx.For, pieces: Pieces, piece: int) -> tirx.For:
    """Return the row with its conditions replaced by their results in a piece. Otherwise each piece
    would contain the code of all others, and TVM's passes would take quadratic time.
    """
    realize = row.body
    block = realize.block
    if not realize.iter_values[-1].same_as(row.loop_var):
        return row

    def visit(node: Expr) -> Expr | None:
        if isinstance(node, tirx.Select):
            condition, yes, no = node.condition, node.true_value, node.false_value
        elif is_if_then_else(node):
            condition, yes, no = node.args
        else:
            return None
        left = pieces.left(condition, piece)
        if isinstance(left, bool):
            return substitute(yes if left else no, visit)
        choose = tirx.Select if isinstance(node, tirx.Select) else tirx.if_then_else
        return (
            None
            if left.same_as(condition)
            else choose(left, *(substitute(x, visit) for x in (yes, no)))
        )

    store = block.body
    value = substitute(store.value, visit)
    read = {load.source for load in collect(value, TensorLoad)}
    inside = s_tir.SBlock(
        block.iter_vars,
        [region for region in block.reads if region.source in read],
        block.writes,
        block.name_hint,
        tirx.BufferStore(store.buffer, value, store.indices),
        annotations=block.annotations,
    )
    return with_loop_body(row, s_tir.SBlockRealize(realize.iter_values, realize.predicate, inside))
