"""A residual and the layer norm of the sum, as one kernel: the sum stays in registers.

Each row is one block's, each thread has one vector of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax, s_tir, te, tirx
from tvm.ir import Expr
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.kernels.common.loops import find
from tvmify.compiler.passes.rewriting import is_call

#: Names of the blocks.
_BLOCKS = _SUM, _TOTAL, _SQUARES, _NORMED = (
    "residual_sum",
    "row_total",
    "row_squares",
    "residual_norm",
)
_ADD, _ASTYPE = (tvm.ir.Op.get(f"relax.{name}") for name in ("add", "astype"))
_DTYPES = frozenset({"float16", "bfloat16", "float32"})
#: Nothing is fused with such functions.
_OPAQUE = {"op_pattern": 8}
_VECTOR_BYTES, _WARP, _MOST_THREADS = 16, 32, 1024


def lanes_of(width: int, dtype: str) -> int | None:
    """Return how many elements of a row each thread has; None if they cannot be shared so."""
    most = _VECTOR_BYTES * 8 // tvm.DataType(dtype).bits
    for lanes in (most, most // 2, most // 4):
        if lanes > 1 and width % (lanes * _WARP) == 0 and width // lanes <= _MOST_THREADS:
            return lanes
    return None


def operands_of(builder: relax.BlockBuilder, total: Expr) -> tuple[Expr, Expr] | None:
    """Return two tensors of one shape and dtype that were added, and rounded once, if they were."""
    dtype, value = total.ty.dtype, builder.lookup_binding(total)
    if is_call(_ASTYPE, value) and isinstance(value.args[0], relax.Var):
        value = builder.lookup_binding(value.args[0])
    if not is_call(_ADD, value):
        return None
    found = []
    for operand in value.args:
        source = builder.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        one = source.args[0] if is_call(_ASTYPE, source) else operand
        if one.ty.dtype != dtype or _shape(one) != _shape(total):
            return None
        found.append(one)
    return None if found[0].same_as(found[1]) else (found[0], found[1])


def sum_and_norm(
    builder: relax.BlockBuilder,
    total: Expr,
    scale: Expr,
    shift: Expr,
    epsilon: float,
) -> tuple[relax.Var, relax.Var] | None:
    """Compute a sum and its layer norm along the last axis by one kernel.

    Returns
    -------
    tuple[relax.Var, relax.Var] | None
        Both; None if it is no such sum, or PyTorch's kernel is to compute the norm.
    """
    (*rows, width), dtype = _shape(total), str(total.ty.dtype)
    operands = operands_of(builder, total) if isinstance(total, relax.Var) else None
    is_shared = dtype in _DTYPES and lanes_of(width, dtype) is not None
    if operands is None or not is_shared or math.prod(rows) == 1:  # one row is added by its product
        return None
    both = builder.emit(
        builder.call_te(
            _compute,
            *operands,
            scale,
            shift,
            epsilon,
            primfunc_name_hint=_NORMED,
            primfunc_attrs=_OPAQUE,
        )
    )
    return builder.emit(relax.TupleGetItem(both, 0)), builder.emit(relax.TupleGetItem(both, 1))


def _compute(
    x: te.Tensor, residual: te.Tensor, scale: te.Tensor, shift: te.Tensor, epsilon: float
) -> list[te.Tensor]:
    *rows, width = x.shape
    dtype, wide = x.dtype, "float32"

    def sum_over(name: str, element: object) -> te.Tensor:
        along = te.reduce_axis((0, width), "along")
        return te.compute(rows, lambda *at: te.sum(element(at, along), axis=along), name=name)

    def added(*at: te.Var) -> Expr:
        return (x[at].astype(wide) + residual[at].astype(wide)).astype(dtype)

    total = te.compute(x.shape, added, name=_SUM)
    mean = sum_over(_TOTAL, lambda at, along: total[(*at, along)].astype(wide))
    part = tirx.const(1.0 / int(width), wide)

    def centred(at: Sequence[te.Var], along: te.Var) -> Expr:
        return total[(*at, along)].astype(wide) - mean[tuple(at)] * part

    def squared(at: Sequence[te.Var], along: te.Var) -> Expr:
        return centred(at, along) * centred(at, along)

    squares = sum_over(_SQUARES, squared)

    def normed(*at: te.Var) -> Expr:
        *row, along = at
        factor = tirx.rsqrt(squares[tuple(row)] * part + tirx.const(epsilon, wide))
        scaled = centred(row, along) * factor * scale[along].astype(wide)
        return (scaled + shift[along].astype(wide)).astype(dtype)

    return [total, te.compute(x.shape, normed, name=_NORMED)]


def _shape(x: Expr) -> list[int]:
    return [int(extent) for extent in x.ty.shape.values]


class ResidualNorm(ScheduleRule):
    """Of what `sum_and_norm` makes."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule it: a block for each row, a thread for each vector of it."""
        del target, tunable
        sch = s_tir.Schedule(func)
        total, mean, squares, normed = (find(sch, name) for name in _BLOCKS)
        if total is None or mean is None or squares is None or normed is None:
            return None
        about = sch.get(total)
        lanes = lanes_of(int(about.iter_vars[-1].dom.extent), str(about.writes[0].source.dtype))
        computed = [sch.get(block).writes[0].source for block in (total, mean, squares)]
        parameters = [
            index
            for index, region in enumerate(sch.get(normed).reads)
            if not any(region.source.same_as(buffer) for buffer in computed)
        ]
        # The result that all else follows; the sum is still in registers where it is read again.
        summed = sch.cache_write(total, 0, "local")
        held = sch.cache_read(mean, 0, "local", [mean, squares, normed])
        row = sch.fuse(*sch.get_loops(summed)[:-1])
        sch.bind(row, "blockIdx.x")
        sch.compute_at(total, row)
        for block in (held, mean, squares, normed):
            sch.reverse_compute_at(block, row)
        stored = sch.cache_write(normed, 0, "local")
        sch.reverse_compute_at(stored, row)
        threads = {}
        for block in (total, summed, held, mean, squares, normed, stored):
            threads[block], vector = sch.split(sch.get_loops(block)[-1], [None, lanes])
            sch.bind(threads[block], "threadIdx.x")
            if block in (summed, held, stored):
                sch.vectorize(vector)
            else:
                sch.unroll(vector)
        for block, indices in ((total, [0, 1]), (normed, parameters)):
            for index in indices:
                loaded = sch.cache_read(block, index, "local")
                sch.compute_at(loaded, threads[block])
                sch.vectorize(sch.get_loops(loaded)[-1])
        for block in (mean, squares):
            sch.set_scope(block, 0, "local")
        return sch
