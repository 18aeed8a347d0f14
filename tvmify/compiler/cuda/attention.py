"""Attention by PyTorch's fused kernels: flash, memory-efficient, or cuDNN's, as it chooses."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Expr

from tvmify.compiler.aten.calls import Aten, aten
from tvmify.compiler.kernels.attention.lower_attention import AttentionLowering
from tvmify.compiler.kernels.attention.template import Attention, Operand
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: Swaps the axes of positions and heads.
_SWAP = [0, 2, 1, 3]


@compiler_pass
class CallAttention(AttentionLowering):
    """Lower attention as `LowerAttention` does, for a GPU."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        #: Masks converted once, as PyTorch would convert them in each layer.
        self.addends: dict[tuple[Expr, str], Expr] = {}

    def addend(self, mask: Expr, dtype: str) -> Expr:
        """Return a mask in the dtype of the scores, shared by layers."""
        known = self.addends.get((mask, dtype))
        if known is None:
            if str(mask.ty.dtype) == "bool":
                shown, hidden = (relax.const(value, dtype) for value in (0.0, -math.inf))
                known = self.builder_.emit(relax.op.where(mask, shown, hidden))
            else:  # which cuDNN would read as if it had that dtype
                known = self.builder_.emit(relax.op.astype(mask, dtype))
            self.addends[mask, dtype] = known
        return known

    def computed(self, tensors: list[Expr], about: Attention, mask: Expr | None) -> Expr:
        """Return a call of ``scaled_dot_product_attention``, corrected for a fill."""
        operands = (about.query, about.key, about.value)
        if mask is not None and str(mask.ty.dtype) not in (about.dtype, _kept(about)):
            mask = self.addend(mask, about.dtype)
        counts = (about.heads, about.heads // about.shared, about.heads // about.shared)

        def body(record: Aten, *values: Any) -> Any:
            located = zip(values[:3], operands, counts, strict=True)
            query, key, value = (_heads(record, *one) for one in located)
            seen = values[3] if mask is not None else None
            causal = about.causal
            if seen is not None and causal:  # PyTorch takes either; such a mask is of bool
                size = [-1, -1, about.query.length, about.key.length]
                seen, causal = record("tril", record("expand", seen, size, False), 0), False
            if seen is not None and about.fill is not None:
                weights = _filled(record, about, query, key, seen)
                return record("permute", record("matmul", weights, value), _SWAP)
            addend = seen
            if seen is not None and str(mask.ty.dtype) == "bool":
                # With bools, cuDNN lets queries that see no key attend to some.
                addend = record("log", record("type_as", seen, query))
            result = record(
                "scaled_dot_product_attention",
                query,
                key,
                value,
                addend,
                0.0,
                causal,
                about.scale,
                about.shared > 1,
            )
            if seen is not None and math.isnan(about.empty):
                result = record("add", result, _nan_where_empty(record, seen, mask, result), 1)
            return record("permute", result, _SWAP)

        tensors = tensors if mask is None else [*tensors, mask]
        return aten(tensors, about.out, about.dtype, body)


def _kept(about: Attention) -> str | None:
    """Return the dtype of masks if these are not just added to scores."""
    return "bool" if about.causal or about.fill is not None else None


def _heads(record: Aten, x: Any, operand: Operand, count: int) -> Any:
    """Return a view of the operand's heads, heads before positions."""
    if operand.heads_first:
        return x
    if operand.shape[2] != count:
        end = operand.first + operand.step * (count - 1) + 1
        x = record("slice", x, 2, operand.first, end, operand.step)
    return record("permute", x, _SWAP)


def _filled(record: Aten, about: Attention, query: Any, key: Any, seen: Any) -> Any:
    """Return the attention with its steps as single operators: PyTorch's kernels only add to
    scores.
    """
    transposed = record("transpose", key, -2, -1)
    scores = record("mul", record("matmul", query, transposed), about.scale)
    scores = record("masked_fill", scores, record("logical_not", seen), about.fill)
    return record("softmax", scores, -1, None)


def _nan_where_empty(record: Aten, seen: Any, mask: Expr, result: Any) -> Any:
    """Return, as ``[batch, heads, queries, 1]``, NaN for queries that see no key, and else zero."""
    if str(mask.ty.dtype) == "bool":
        sees = record("type_as", record("any", seen, -1, True), result)
        largest = record("log", sees)
    else:
        largest = record("amax", seen, [-1], True)
    return record("mul", largest, 0.0)  # largest is minus infinity there
