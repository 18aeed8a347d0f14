"""Marks functions for FuseOps that read other places by symbolic sizes, such as a concatenation of
parts of any length, or by indices. TVM takes ``x[i - n]`` for an index that it does not understand.
"""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.patterns import Pattern, pattern_of
from tvmify.compiler.kernels.common.rewriting import DIVISIONS, collect
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class MarkInjective:
    """Set the fusion pattern of functions whose elements each have one formula.

    Not of functions that divide by symbols: those are reshapes, which as functions of their own
    become views. Nor of resizing, whose places are computed from floats or read from a table: in
    the next function, elements would be computed again each time that it reads them.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if pattern_of(function) != Pattern.OPAQUE:
            return function
        is_static = sizes.is_static(*sizes.of_parameters(function))
        if (is_static and not gathered(function)) or not _is_injective(function):
            return function
        return function.with_attr(Pattern.INJECTIVE.attributes)


def gathered(function: tirx.PrimFunc) -> set[tirx.Var]:
    """Return the tensors that a function reads at indices from another tensor."""
    loads = collect(function.body, TensorLoad)
    return {load.source for load in loads if any(collect(i, TensorLoad) for i in load.indices)}


def _is_injective(function: tirx.PrimFunc) -> bool:
    stmt = function.body.block.body if isinstance(function.body, s_tir.SBlockRealize) else None
    while isinstance(stmt, tirx.For):
        stmt = stmt.body
    if not isinstance(stmt, s_tir.SBlockRealize):
        return False
    axes, store = stmt.block.iter_vars, stmt.block.body
    if not isinstance(store, tirx.BufferStore) or len(store.indices) != len(axes):
        return False
    if any(int(axis.iter_type) != tirx.IterVar.DataPar for axis in axes):
        return False
    in_order = all(i.same_as(axis.var) for i, axis in zip(store.indices, axes, strict=True))
    return in_order and _has_plain_indices(store.value)


def _has_plain_indices(value: Expr) -> bool:
    only_reads = isinstance(value, TensorLoad)  # a sum of weighted elements would be repeated

    def is_plain(node: Expr) -> bool:
        is_quotient = isinstance(node, DIVISIONS) and not sizes.is_static(node.b)
        is_rounded = isinstance(node, tirx.Cast) and "float" in str(node.value.ty.dtype)
        return not (is_quotient or is_rounded or (isinstance(node, TensorLoad) and not only_reads))

    indices = [index for load in collect(value, TensorLoad) for index in load.indices]
    kinds = (*DIVISIONS, tirx.Cast, TensorLoad)
    return all(is_plain(node) for index in indices for node in collect(index, kinds))
