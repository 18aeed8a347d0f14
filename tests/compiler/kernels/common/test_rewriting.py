"""Replacing statements of a function, and collecting parts of it."""

from __future__ import annotations

import sys

import pytest
from tvm import tirx
from tvm.ir import StringImm

from tvmify.compiler.kernels.common.rewriting import collect, rewrite_body


def _values(stmt: tirx.Stmt) -> list[int]:
    """Return the values that a chain evaluates, from outside in."""
    found = []
    while True:
        if isinstance(stmt, tirx.AttrStmt):
            stmt = stmt.body
        elif isinstance(stmt, tirx.SeqStmt):
            first, stmt = stmt.seq
            found.append(int(first.value))
        else:
            return [*found, int(stmt.value)]


@pytest.fixture
def chain() -> tirx.PrimFunc:
    """Nested declarations, each containing all later ones, as for 400 tensors in one function."""
    stmt = tirx.Evaluate(0)
    for i in range(1, sys.getrecursionlimit()):
        declaration = tirx.AttrStmt(StringImm("tensor"), "key", tirx.const(i, "int32"), stmt)
        stmt = tirx.SeqStmt([tirx.Evaluate(i), declaration])
    return tirx.PrimFunc([], stmt)


def test_a_chain_of_declarations_may_be_longer_than_the_stack(chain: tirx.PrimFunc) -> None:
    # A RecursionError sent 140 linear layers in one function to eager PyTorch.
    def odd_become_negative(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if isinstance(stmt, tirx.Evaluate) and int(stmt.value) % 2:
            return tirx.Evaluate(-int(stmt.value))
        return None

    before = _values(chain.body)
    after = _values(rewrite_body(chain, odd_become_negative).body)

    assert after == [-value if value % 2 else value for value in before]


def test_no_match_returns_the_same_function(chain: tirx.PrimFunc) -> None:
    assert rewrite_body(chain, lambda _: None).same_as(chain)
    either = tirx.IfThenElse(tirx.Var("x", "int32") > 0, chain.body, tirx.Evaluate(2))
    guarded = tirx.PrimFunc([], either)
    assert rewrite_body(guarded, lambda _: None).same_as(guarded)


def test_replacement_is_not_rewritten_again() -> None:
    def twice(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if not isinstance(stmt, tirx.Evaluate):
            return None
        return tirx.SeqStmt([stmt, tirx.Evaluate(stmt.value + 1)])

    assert _values(rewrite_body(tirx.PrimFunc([], tirx.Evaluate(1)), twice).body) == [1, 2]


def test_parts_are_collected_from_outside_in() -> None:
    x = tirx.Var("x", "int32")
    inner = tirx.FloorMod(x, tirx.const(3, "int32"))
    outer = tirx.FloorDiv(inner + x, tirx.const(2, "int32"))
    found = collect(outer * x, (tirx.FloorDiv, tirx.FloorMod))
    assert all(part.same_as(wanted) for part, wanted in zip(found, [outer, inner], strict=True))
    assert collect(outer, tirx.Mul) == []
    assert all(part.same_as(x) for part in collect(outer, tirx.Var))
    assert len(collect(outer, tirx.Var)) == 2
