"""Nests that run only where a flag is set, which neither TE nor a schedule can say."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.tirx import Stmt

from tvmify.compiler.schedule.tails import _loop, _with_body


def run_only_if(function: tirx.PrimFunc, flag: str, blocks: tuple[str, ...]) -> tirx.PrimFunc:
    """Put the nests of some blocks under the condition that a flag is not zero.

    Parameters
    ----------
    flag
        Name of the block that computes the flag. It stands, without loops of its own, in the same
        sequence of statements as the nests, before them.
    blocks
        Names of the blocks to guard. What they write is undefined where the flag is zero.
    """
    return function.with_body(_rewrite(function.body, flag, blocks))


def _rewrite(stmt: Stmt, flag: str, blocks: tuple[str, ...]) -> Stmt:
    if isinstance(stmt, tirx.SeqStmt):
        condition, parts = None, []
        for part in stmt.seq:
            if isinstance(part, s_tir.SBlockRealize) and part.block.name_hint == flag:
                condition = tirx.BufferLoad(part.block.writes[0].source, part.iter_values) != 0
            if condition is not None and _names(part) <= set(blocks):
                parts.append(tirx.IfThenElse(condition, part, None))
            else:
                parts.append(_rewrite(part, flag, blocks))
        return tirx.SeqStmt(parts)
    if isinstance(stmt, s_tir.SBlockRealize):
        block = stmt.block
        body = _rewrite(block.body, flag, blocks)
        if body.same_as(block.body):
            return stmt
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, _with_body(block, body))
    if isinstance(stmt, tirx.For):
        body = _rewrite(stmt.body, flag, blocks)
        return stmt if body.same_as(stmt.body) else _loop(stmt, body)
    return stmt


def _names(stmt: Stmt) -> set[str]:
    """Names of all blocks in a nest of loops."""
    if isinstance(stmt, tirx.SeqStmt):
        return set().union(*map(_names, stmt.seq))
    if isinstance(stmt, tirx.For):
        return _names(stmt.body)
    return {str(stmt.block.name_hint)} if isinstance(stmt, s_tir.SBlockRealize) else {""}
