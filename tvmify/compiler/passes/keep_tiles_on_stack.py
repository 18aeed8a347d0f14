"""Let LLVM see that a tile of sums is nobody else's, so that it lives in registers.

TVM asks the runtime for every buffer of more than a kilobyte. For a tile of sums that is a call
per tile, and worse: LLVM cannot promote memory that a function returned, so the tile is cleared,
written and read again in memory. Sixteen AVX-512 registers are a kilobyte, and tiles have up to
twenty-eight.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.tirx import Stmt

#: Tells TVM's ``LowerTVMBuiltin`` to leave an allocation to LLVM.
_KEEP = "disable_lower_builtin"


@tvm.transform.module_pass(opt_level=0, name="KeepTilesOnStack")
class KeepTilesOnStack:
    """Mark the allocations of scope "local", in lowered functions, to stay on the stack."""

    def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
        """Rewrite the TIR functions."""
        for variable, function in ir_mod.functions_items():
            if isinstance(function, tirx.PrimFunc):
                body = _marked(function.body)
                if not body.same_as(function.body):
                    ir_mod.update_func(variable, function.with_body(body))
        return ir_mod


def _marked(stmt: Stmt) -> Stmt:
    if isinstance(stmt, tirx.AllocBuffer):
        if stmt.buffer.scope() != "local":
            return stmt
        return tirx.AllocBuffer(
            stmt.buffer, {**stmt.annotations, _KEEP: tirx.const(True)}, stmt.span
        )
    if isinstance(stmt, tirx.SeqStmt):
        parts = [_marked(part) for part in stmt.seq]
        same = all(new.same_as(old) for new, old in zip(parts, stmt.seq, strict=True))
        return stmt if same else tirx.SeqStmt(parts)
    if isinstance(stmt, tirx.IfThenElse):
        then, other = _marked(stmt.then_case), stmt.else_case
        other = _marked(other) if other is not None else None
        return tirx.IfThenElse(stmt.condition, then, other)
    if not isinstance(stmt, (tirx.For, tirx.AttrStmt)):
        return stmt
    body = _marked(stmt.body)
    if body.same_as(stmt.body):
        return stmt
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
    return tirx.For(
        stmt.loop_var,
        stmt.min,
        stmt.extent,
        stmt.kind,
        body,
        stmt.thread_binding,
        stmt.annotations,
        stmt.step,
    )
