"""Maximum pooling of volumes ``[batch, channel, depth, height, width]``: the maxima over depth and
height first, as vectors along a row, and from these few the maxima along the row.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler.costs import TILE
from tvmify.compiler.kernels.common.axes import loops_along, named, own_loops
from tvmify.compiler.kernels.common.loops import (
    fuse,
    iterations,
    output_bits,
    parallel_if_worth,
    vectorize,
)
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.elementwise.keep_nan import KEEP_NAN, maximum
from tvmify.compiler.kernels.finish.epilogue import inline_producers
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import is_static, sizes_of

#: Name of the rule, and of the block by which it knows its functions.
NAME = "volume maximum"
#: Name of the block with the maxima over depth and height.
_ROWS = "volume_rows"


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.max_pool3d`` of floats in volumes of known size."""
    attributes, shape, out = call.attrs, sizes_of(call.args[0].ty.shape), sizes_of(call.ty.shape)
    size, strides, before = (
        [int(value) for value in values]
        for values in (attributes.pool_size, attributes.strides, attributes.padding[:3])
    )
    is_plain = str(attributes.layout) == "NCDHW" and "float" in str(call.ty.dtype)
    # A place beside the volume is replaced by its border, which is in the same window only if that
    # has no gaps, and reaches the volume.
    is_dense = all(int(step) == 1 for step in attributes.dilation) and all(
        pad < k for pad, k in zip(before, size, strict=True)
    )
    if not (is_plain and is_dense and is_static(*shape, *out)) or 0 in out:
        return KEEP_NAN[call.op.name](builder, call)

    def place(axis: int, at: Any, offset: Any) -> Any:
        position = at * strides[axis] + offset - before[axis]
        return tirx.max(tirx.min(position, int(shape[axis + 2]) - 1), 0)

    def kernel(x: te.Tensor) -> te.Tensor:
        greatest = te.comm_reducer(
            maximum, lambda dtype: tirx.const(-math.inf, str(dtype)), name="greatest"
        )
        offsets = [te.reduce_axis((0, k), f"k{axis}") for axis, k in enumerate(size)]
        outer = "image", "channel", "z", "y"
        rows = te.compute(
            [*out[:4], shape[4]],
            lambda n, c, z, y, column: greatest(
                x(n, c, place(0, z, offsets[0]), place(1, y, offsets[1]), column), axis=offsets[:2]
            ),
            name=_ROWS,
            attrs=named(*outer, "column", "k0", "k1"),
        )
        return te.compute(
            out,
            lambda *i: greatest(rows(*i[:4], place(2, i[4], offsets[2])), axis=offsets[2]),
            name=NAME,
            attrs=named(*outer, "x", "k2"),
        )

    return builder.call_te(kernel, call.args[0], primfunc_name_hint="max_pool3d")


class VolumeMaximum(Rule):
    """Rows in parallel; in each, vectors of columns, and then the windows of the row."""

    name = NAME
    anchors = frozenset({NAME})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize`."""
        inline_producers(sch, _ROWS)
        rows, anchor = sch.get_sblock(_ROWS), sch.get_sblock(NAME)
        lanes = machine.lanes(output_bits(sch, anchor))
        *outer, x, k2 = own_loops(sch, anchor).values()
        row = fuse(sch, outer)
        parallel_if_worth(sch, row, machine, iterations(sch, rows))
        sch.compute_at(rows, row, preserve_unit_loops=True)
        column, k0, k1 = loops_along(sch, rows, "column", "k0", "k1")
        tiles, tile = sch.split(column, [None, TILE.most_vectors * lanes])
        sch.reorder(tiles, k0, k1, tile)
        vectorize(sch, tile, lanes)
        sch.reorder(k2, x)
        vectorize(sch, x, lanes)
        for block, first in ((rows, k0), (anchor, k2)):
            initial = sch.decompose_reduction(block, first)
            sch.vectorize(sch.get_loops(initial)[-1])
        return sch
