"""Recomputes tiles that saw NaN or infinity, which neither TE nor a schedule can express."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler.kernels.common.rewriting import (
    names_of,
    rewrite,
    rewrite_body,
    substitute,
    with_new_variables,
)
from tvmify.compiler.kernels.conv.winograd.template import EXACT, SPOILT
from tvmify.compiler.kernels.finish.handwritten import STORES_TWICE

#: Names of the blocks that compute a tile without the transform.
_AGAIN = frozenset({EXACT + "_init", EXACT + "_update"})


def redo_spoilt_tiles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Store a tile, and if its flag is not zero, compute it without the transform and store again.

    The block `SPOILT` computes the flag. It stands, without loops of its own, in a sequence of
    statements: before the nests that compute the tile again, and a last one that stores either by
    ``Select(flag == 0, first, again)``. Selecting per element would keep both in registers. Yet it
    is done if the tile is not stored in a result of the function, since its memory may be shared
    with an operand.

    Raises
    ------
    ValueError
        There is no such sequence.
    """

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.SeqStmt):
            return None
        names = [names_of(part) for part in stmt.seq]
        if {SPOILT} not in names:
            return None
        place = names.index({SPOILT})
        *before, flagged = stmt.seq[: place + 1]
        *nests, store = stmt.seq[place + 1 :]
        if not all(name <= _AGAIN for name in names[place + 1 : -1]):
            raise ValueError(f"other statements than {sorted(_AGAIN)}: {nests}")
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
        raise ValueError(f"no block {SPOILT} in a sequence of statements")
    return changed.with_attr(STORES_TWICE, True)


def _written(nest: Stmt) -> tirx.Var:
    """The buffer that the block in a loop nest writes."""
    while isinstance(nest, tirx.For):
        nest = nest.body
    return nest.block.writes[0].source


def _stored(store: Stmt, flag: tirx.Var, first: bool) -> Stmt:
    """Return the nest that stores one of the two."""
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
