"""Nests that run only where a flag is set, which neither TE nor a schedule can say."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.tirx import Stmt

from tvmify.compiler.schedule.rewriting import rewrite_body


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

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.SeqStmt):
            return None
        condition, parts = None, []
        for part in stmt.seq:
            if isinstance(part, s_tir.SBlockRealize) and part.block.name_hint == flag:
                condition = tirx.BufferLoad(part.block.writes[0].source, part.iter_values) != 0
            guarded = condition is not None and names_of(part) <= set(blocks)
            parts.append(tirx.IfThenElse(condition, part, None) if guarded else part)
        return tirx.SeqStmt(parts) if condition is not None else None

    return rewrite_body(function, visit)


def names_of(stmt: Stmt) -> set[str]:
    """Names of all blocks in a nest of loops; an empty one for other statements."""
    if isinstance(stmt, tirx.SeqStmt):
        return set().union(*map(names_of, stmt.seq))
    if isinstance(stmt, tirx.For):
        return names_of(stmt.body)
    return {str(stmt.block.name_hint)} if isinstance(stmt, s_tir.SBlockRealize) else {""}
