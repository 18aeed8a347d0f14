"""Layer norms along the last axis, also of a sum with a residual, as one kernel.

Each block computes one row, and each thread has one vector of it, in registers from the load to the
result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax, s_tir, te, tirx
from tvm.ir import Expr
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.costs import GPU
from tvmify.compiler.cuda.gpus import FLOAT_DTYPES, vector_lanes
from tvmify.compiler.kernels.common.loops import find
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.passes.rewriting import is_call
from tvmify.compiler.passes.views import static_shape

#: Names of the blocks; the first exists only if a residual is added.
_SUM, _TOTAL, _SQUARES, _NORMED = "residual_sum", "row_total", "row_squares", "layer_norm"
_ADD, _ASTYPE = (tvm.ir.Op.get(f"relax.{name}") for name in ("add", "astype"))


def lanes_of(width: int, dtype: str) -> int | None:
    """Return how many elements of a row each thread has; None if threads cannot share it."""
    most = vector_lanes(dtype)
    for lanes in (most, most // 2, most // 4):
        if lanes > 1 and width % (lanes * GPU.warp) == 0 and width // lanes <= GPU.most_threads:
            return lanes
    return None


def operands_of(builder: relax.BlockBuilder, total: Expr) -> tuple[Expr, Expr] | None:
    """Return the two tensors, of one shape and dtype, whose sum rounded once is `total`, if any."""
    dtype, value = total.ty.dtype, builder.lookup_binding(total)
    if is_call(_ASTYPE, value) and isinstance(value.args[0], relax.Var):
        value = builder.lookup_binding(value.args[0])
    if not is_call(_ADD, value):
        return None
    found = []
    for operand in value.args:
        source = builder.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        one = source.args[0] if is_call(_ASTYPE, source) else operand
        if one.ty.dtype != dtype or static_shape(one) != static_shape(total):
            return None
        found.append(one)
    return None if found[0].same_as(found[1]) else (found[0], found[1])


def norm(
    builder: relax.BlockBuilder, x: Expr, scale: Expr, shift: Expr, epsilon: float
) -> tuple[Expr, relax.Var] | None:
    """Compute a layer norm along the last axis by a kernel, which also computes `x` if that is a
    sum.

    Returns
    -------
    tuple[Expr, relax.Var] | None
        The value of `x`, which the kernel may compute, and the norm; None to leave it to PyTorch's
        kernel.
    """
    (*rows, width), dtype = static_shape(x), str(x.ty.dtype)
    if not rows or math.prod(rows) == 0:
        return None
    if dtype not in FLOAT_DTYPES or lanes_of(width, dtype) is None:
        return None
    # A single row is added by its product.
    is_sum = isinstance(x, relax.Var) and math.prod(rows) > 1
    summands = operands_of(builder, x) if is_sum else None
    made = builder.emit(
        builder.call_te(
            _normed if summands is None else _sum_and_norm,
            *(summands or (x,)),
            scale,
            shift,
            epsilon,
            primfunc_name_hint=_NORMED if summands is None else f"{_SUM}_{_NORMED}",
            primfunc_attrs=Pattern.OPAQUE.attributes,
        )
    )
    if summands is None:
        return x, made
    return builder.emit(relax.TupleGetItem(made, 0)), builder.emit(relax.TupleGetItem(made, 1))


def _sum_and_norm(
    x: te.Tensor, residual: te.Tensor, scale: te.Tensor, shift: te.Tensor, epsilon: float
) -> list[te.Tensor]:
    def added(*at: te.Var) -> Expr:
        return (x[at].astype("float32") + residual[at].astype("float32")).astype(x.dtype)

    both = te.compute(x.shape, added, name=_SUM)
    return [both, _normed(both, scale, shift, epsilon)]


def _normed(x: te.Tensor, scale: te.Tensor, shift: te.Tensor, epsilon: float) -> te.Tensor:
    *rows, width = x.shape
    wide = "float32"

    def sum_over(name: str, element: object) -> te.Tensor:
        along = te.reduce_axis((0, width), "along")
        return te.compute(rows, lambda *at: te.sum(element(at, along), axis=along), name=name)

    total = sum_over(_TOTAL, lambda at, along: x[(*at, along)].astype(wide))
    part = tirx.const(1.0 / int(width), wide)

    def centred(at: Sequence[te.Var], along: te.Var) -> Expr:
        return x[(*at, along)].astype(wide) - total[tuple(at)] * part

    def squared(at: Sequence[te.Var], along: te.Var) -> Expr:
        return centred(at, along) * centred(at, along)

    squares = sum_over(_SQUARES, squared)

    def normed(*at: te.Var) -> Expr:
        *row, along = at
        factor = tirx.rsqrt(squares[tuple(row)] * part + tirx.const(epsilon, wide))
        scaled = centred(row, along) * factor * scale[along].astype(wide)
        return (scaled + shift[along].astype(wide)).astype(x.dtype)

    return te.compute(x.shape, normed, name=_NORMED)


class Norm(ScheduleRule):
    """Schedules the functions of `norm`."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """Schedule a function: a block for each row, a thread for each vector of the row."""
        del target, tunable
        sch = Schedule(func)
        added = find(sch, _SUM)
        total, squares, normed = (find(sch, name) for name in (_TOTAL, _SQUARES, _NORMED))
        if total is None or squares is None or normed is None:
            return None
        row_of = sch.get(total).reads[0].source
        lanes = lanes_of(int(row_of.shape[-1]), str(row_of.dtype))
        computed = [row_of, *(sch.get(block).writes[0].source for block in (total, squares))]
        parameters = [
            index
            for index, region in enumerate(sch.get(normed).reads)
            if not any(region.source.same_as(buffer) for buffer in computed)
        ]
        # All blocks are computed at this result, so that the sum stays in registers.
        summed = None if added is None else sch.cache_write(added, 0, "local")
        held = sch.cache_read(total, 0, "local", [total, squares, normed])
        first = held if summed is None else summed
        row = sch.fuse(*sch.get_loops(first)[:-1])
        sch.bind(row, "blockIdx.x")
        if added is not None:
            sch.compute_at(added, row)
            sch.reverse_compute_at(held, row)
        for block in (total, squares, normed):
            sch.reverse_compute_at(block, row)
        stored = sch.cache_write(normed, 0, "local")
        sch.reverse_compute_at(stored, row)
        # Loaded early, while threads wait for each other.
        loaded = [sch.cache_read(normed, index, "local") for index in parameters]
        loaded += [] if added is None else [sch.cache_read(added, at, "local") for at in range(2)]
        for block in loaded:
            sch.compute_at(block, row, index=0)
        vectors = (summed, held, stored, *loaded)
        for block in (*vectors, added, total, squares, normed):
            if block is None:
                continue
            thread, vector = sch.split(sch.get_loops(block)[-1], [None, lanes])
            sch.bind(thread, "threadIdx.x")
            if block in vectors:
                sch.vectorize(vector)
            else:
                sch.unroll(vector)
        for block in (total, squares):
            sch.set_scope(block, 0, "local")
        return sch
