"""Rewrites statements and expressions where schedules have no primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Expr, Range, StringImm, TensorLoad, TensorRegion
from tvm.tirx import Stmt

Visit = Callable[[Stmt], Stmt | None]
#: The operations that divide integers, by either rounding.
DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def rewrite_body(function: tirx.PrimFunc, visit: Visit) -> tirx.PrimFunc:
    """Replace each statement for which `visit` returns another; the replacement is not visited."""
    body = rewrite(function.body, visit)
    return function if body.same_as(function.body) else function.with_body(body)


def rewrite_loops(
    function: tirx.PrimFunc, mark: str, change: Callable[[tirx.For, Any], Stmt]
) -> tirx.PrimFunc:
    """Replace the loops that have an annotation.

    Parameters
    ----------
    mark
        The name of the annotation.
    change
        Takes a loop without the annotation, and the value that it had.
    """

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.For) or mark not in stmt.annotations:
            return None
        annotations = dict(stmt.annotations)
        value = annotations.pop(mark)
        loop = tirx.For(
            stmt.loop_var, stmt.min, stmt.extent, stmt.kind, stmt.body, annotations=annotations
        )
        return change(loop, value)

    return rewrite_body(function, visit)


def with_loop_body(loop: tirx.For, body: Stmt, variable: tirx.Var | None = None) -> tirx.For:
    """Return a loop like this one around another body, perhaps with another variable."""
    return tirx.For(
        loop.loop_var if variable is None else variable,
        loop.min,
        loop.extent,
        loop.kind,
        body,
        loop.thread_binding,
        loop.annotations,
        loop.step,
    )


def substitute(node: Expr, visit: Callable[[Expr], Expr | None]) -> Expr:
    """Replace each part of an expression for which `visit` returns another."""
    changed = visit(node)
    if changed is not None:
        return changed

    def part(name: str) -> Expr:
        return substitute(getattr(node, name), visit)

    if isinstance(node, TensorLoad):
        return tirx.BufferLoad(node.source, [substitute(index, visit) for index in node.indices])
    if isinstance(node, Call):
        arguments = [substitute(argument, visit) for argument in node.args]
        return Call(node.op, arguments, node.attrs, node.ty_args, ret_ty=node.ty)
    if isinstance(node, tirx.Select):
        return tirx.Select(part("condition"), part("true_value"), part("false_value"))
    if isinstance(node, tirx.Cast):
        return tirx.Cast(str(node.ty.dtype), part("value"))
    if hasattr(node, "a") and not hasattr(node, "b"):  # not, of a condition or of bits
        return type(node)(part("a"))
    if isinstance(node, tirx.Let):
        return tirx.Let(node.var, part("value"), part("body"))
    if isinstance(node, tirx.Broadcast):
        return tirx.Broadcast(part("value"), node.lanes)
    if isinstance(node, (tirx.Ramp, tirx.Shuffle)):
        return node
    if hasattr(node, "a") and hasattr(node, "b"):
        return type(node)(part("a"), part("b"))
    if isinstance(node, (tirx.Var, tirx.IntImm, tirx.FloatImm, StringImm)):
        return node
    raise TypeError(f"unknown expression: {type(node).__name__}")


def with_values(node: Expr, values: Mapping[tirx.Var, Expr]) -> Expr:
    """Replace variables in an expression by their values."""
    return substitute(node, lambda part: values.get(part) if isinstance(part, tirx.Var) else None)


def collect(node: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return all parts of some kinds, each before those inside it."""
    found: list[Any] = []
    tvm_ffi.structural_walk(node, (kinds, found.append), order="pre")
    return found


def with_new_variables(nest: Stmt, old: Mapping[tirx.Var, tirx.Var] | None = None) -> Stmt:
    """Copy loops around one block with new variables, since a variable has one definition."""
    new = dict(old or {})

    def renamed(node: Expr) -> Expr:
        return with_values(node, new)

    def region(read: TensorRegion) -> TensorRegion:
        axes = [Range.from_min_extent(renamed(a.min), renamed(a.extent)) for a in read.region]
        return tirx.BufferRegion(read.source, axes)

    if isinstance(nest, tirx.For):
        new[nest.loop_var] = variable = tirx.Var(nest.loop_var.name, nest.loop_var.ty)
        return with_loop_body(nest, with_new_variables(nest.body, new), variable)
    if isinstance(nest, tirx.BufferStore):
        return tirx.BufferStore(nest.buffer, renamed(nest.value), [*map(renamed, nest.indices)])
    if isinstance(nest, tirx.SeqStmt):
        return tirx.SeqStmt([with_new_variables(part, new) for part in nest.seq])
    if isinstance(nest, tirx.IfThenElse) and nest.else_case is None:
        body = with_new_variables(nest.then_case, new)
        return tirx.IfThenElse(renamed(nest.condition), body, None)
    if not isinstance(nest, s_tir.SBlockRealize):
        raise TypeError(f"no nest of loops around a block: {type(nest).__name__}")
    values, predicate = [*map(renamed, nest.iter_values)], renamed(nest.predicate)
    block = nest.block
    if block.init is not None or block.alloc_buffers or block.match_buffers:
        raise TypeError(f"more than a block that stores: {block}")
    new.update({v.var: tirx.Var(v.var.name, v.var.ty) for v in block.iter_vars})
    inside = s_tir.SBlock(
        [tirx.IterVar(v.dom, new[v.var], v.iter_type) for v in block.iter_vars],
        [*map(region, block.reads)],
        [*map(region, block.writes)],
        block.name_hint,
        with_new_variables(block.body, new),
        annotations=block.annotations,
    )
    return s_tir.SBlockRealize(values, predicate, inside)


def is_if_then_else(node: Expr) -> bool:
    """Whether it computes one of two values, without reading memory for the other."""
    return isinstance(node, Call) and getattr(node.op, "name", "").endswith("if_then_else")


def uses(expression: Expr, variables: Iterable[tirx.Var]) -> bool:
    """Whether one of some variables occurs in an expression."""
    found = tirx.analysis.undefined_vars(expression, [])
    return any(one.same_as(variable) for variable in variables for one in found)


def rewrite(stmt: Stmt, visit: Visit) -> Stmt:
    """Rewrite a statement as `rewrite_body` does."""
    # A statement that declares something contains all that follow. Such a chain may be longer than
    # Python's stack, so a loop walks down the chain and then rebuilds it.
    chain: list[Callable[[Stmt], Stmt]] = []
    while (changed := visit(stmt)) is None:
        if isinstance(stmt, tirx.SeqStmt):
            *before, last = stmt.seq
            before = [rewrite(part, visit) for part in before]
            chain.append(partial(_with_parts, stmt, before))
            stmt = last
        elif isinstance(stmt, tirx.AttrStmt):
            chain.append(partial(_with_attribute, stmt))
            stmt = stmt.body
        else:
            changed = _rewrite_inside(stmt, visit)
            break
    for put in reversed(chain):
        changed = put(changed)
    return changed


def _rewrite_inside(stmt: Stmt, visit: Visit) -> Stmt:
    if isinstance(stmt, s_tir.SBlockRealize):
        body = rewrite(stmt.block.body, visit)
        if body.same_as(stmt.block.body):
            return stmt
        block = with_block_parts(stmt.block, body, stmt.block.annotations)
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, block)
    if isinstance(stmt, tirx.For):
        body = rewrite(stmt.body, visit)
        return stmt if body.same_as(stmt.body) else with_loop_body(stmt, body)
    if isinstance(stmt, tirx.IfThenElse):
        yes = rewrite(stmt.then_case, visit)
        no = None if stmt.else_case is None else rewrite(stmt.else_case, visit)
        if yes.same_as(stmt.then_case) and (no is None or no.same_as(stmt.else_case)):
            return stmt
        return tirx.IfThenElse(stmt.condition, yes, no)
    return stmt


def _with_parts(seq: tirx.SeqStmt, before: list[Stmt], last: Stmt) -> Stmt:
    parts = [*before, last]
    same = all(a.same_as(b) for a, b in zip(parts, seq.seq, strict=True))
    return seq if same else tirx.SeqStmt(parts)


def _with_attribute(stmt: tirx.AttrStmt, body: Stmt) -> Stmt:
    same = body.same_as(stmt.body)
    return stmt if same else tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)


def with_block_parts(
    block: s_tir.SBlock,
    body: Stmt,
    annotations: Mapping[str, object],
    buffers: Sequence[tirx.Var] | None = None,
) -> s_tir.SBlock:
    """Return a block like this one with another body, other annotations, and other tensors."""
    return s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        block.alloc_buffers if buffers is None else buffers,
        block.match_buffers,
        annotations,
    )


def with_buffers(
    function: tirx.PrimFunc, replaced: Callable[[tirx.Var], tirx.Var]
) -> tirx.PrimFunc:
    """Return a function that allocates other tensors."""
    root = function.body.block
    buffers = [*map(replaced, root.alloc_buffers)]
    block = with_block_parts(root, root.body, root.annotations, buffers)
    return function.with_body(s_tir.SBlockRealize([], True, block))


def names_of(stmt: Stmt) -> set[str]:
    """Return the names of all blocks in a nest of loops; an empty name for other statements."""
    if isinstance(stmt, tirx.SeqStmt):
        return set().union(*map(names_of, stmt.seq))
    if isinstance(stmt, tirx.For):
        return names_of(stmt.body)
    return {str(stmt.block.name_hint)} if isinstance(stmt, s_tir.SBlockRealize) else {""}
