"""Recomputes results where a flag is set, which neither TE nor a schedule can express."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import (
    rewrite,
    rewrite_body,
    substitute,
    with_new_variables,
)

#: Attribute of a function that may store a result twice. No result may then take the memory of an
#: operand, as TVM lets it where each store by itself reads what it overwrites: the second would
#: read what the first has stored.
STORES_TWICE = "tvmify.stores_twice"


def redo_if(function: tirx.PrimFunc, flag: str, again: tuple[str, ...]) -> tirx.PrimFunc:
    """Store a tile, and if a flag is not zero, recompute and store it again.

    A store that chose for each element would keep registers for both. It does where the tile is no
    result of the function, whose memory could be an operand's.

    Parameters
    ----------
    flag
        Name of the block that computes the flag. It stands, without loops of its own, in a sequence
        of statements: before the nests of `again`, and a last one that stores either by
        ``Select(flag == 0, first, again)``.
    again
        Names of the blocks that compute it again.

    Raises
    ------
    ValueError
        There is no such sequence.
    """

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.SeqStmt):
            return None
        names = [names_of(part) for part in stmt.seq]
        if {flag} not in names:
            return None
        place = names.index({flag})
        *before, flagged = stmt.seq[: place + 1]
        *nests, store = stmt.seq[place + 1 :]
        if not all(name <= set(again) for name in names[place + 1 : -1]):
            raise ValueError(f"other statements than {again}: {nests}")
        buffer = flagged.block.writes[0].source
        condition = tirx.BufferLoad(buffer, flagged.iter_values) != 0
        if not any(_written(store).same_as(parameter) for parameter in function.params):
            guarded = tirx.IfThenElse(condition, tirx.stmt_seq(*nests), None)
            return tirx.SeqStmt([*before, flagged, guarded, store])
        first = _stored(store, buffer, first=True)
        redone = tirx.SeqStmt([*nests, _stored(store, buffer, first=False)])
        return tirx.SeqStmt([*before, flagged, first, tirx.IfThenElse(condition, redone, None)])

    changed = rewrite_body(function, visit)
    if changed.same_as(function):
        raise ValueError(f"no block {flag} in a sequence of statements")
    return changed.with_attr(STORES_TWICE, True)


def _written(nest: Stmt) -> tirx.Var:
    """The buffer that the block in a loop nest writes."""
    while isinstance(nest, tirx.For):
        nest = nest.body
    return nest.block.writes[0].source


def _stored(store: Stmt, flag: tirx.Var, first: bool) -> Stmt:
    """Return the nest that stores one of both."""
    found = []

    def choose(node: Expr) -> Expr | None:
        if not isinstance(node, tirx.Select) or not isinstance(node.condition, tirx.EQ):
            return None
        read = node.condition.a
        if isinstance(read, tirx.Cast):  # TVM's simplifier widens it
            read = read.value
        if not isinstance(read, TensorLoad) or not read.source.same_as(flag):
            return None
        found.append(node)
        return node.true_value if first else node.false_value

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.BufferStore):
            return None
        return tirx.BufferStore(stmt.buffer, substitute(stmt.value, choose), stmt.indices)

    nest = rewrite(store, visit)
    if not found:
        raise ValueError(f"a store that does not choose: {store}")
    return nest if first else with_new_variables(nest)


def names_of(stmt: Stmt) -> set[str]:
    """Names of all blocks in a nest of loops; an empty one for other statements."""
    if isinstance(stmt, tirx.SeqStmt):
        return set().union(*map(names_of, stmt.seq))
    if isinstance(stmt, tirx.For):
        return names_of(stmt.body)
    return {str(stmt.block.name_hint)} if isinstance(stmt, s_tir.SBlockRealize) else {""}
