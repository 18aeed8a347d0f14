"""Reshapes whose indices keep unchanged axes. TVM computes the position of each element in memory
and splits it again. Here axes that are neither merged nor split keep their index, so that fused
functions are still seen to run along memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import plain
from tvmify.compiler.passes.views import common_axes
from tvmify.compiler.sizes import Size


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.reshape``."""
    if 0 in sizes.hints(call.ty.shape):
        return plain(builder, call)

    def reshape(x: te.Tensor, extents: Sequence[Expr]) -> te.Tensor:
        shape, source = sizes.sizes_of(extents), sizes.sizes_of(x.shape)

        def element(*at: tirx.Var) -> Expr:
            return x(*_indices(at, shape, source))

        return te.compute(shape, element, name="reshape")

    # As an argument, the shape gets the function's own variables, by which TVM sees a view.
    extents = relax.ShapeExpr(call.ty.shape.values)
    return builder.call_te(reshape, call.args[0], extents, primfunc_name_hint="reshape")


def _indices(at: Sequence[Expr], shape: Sequence[Size], source: Sequence[Size]) -> list[Expr]:
    """Where the element at a place of `shape` is in a tensor of shape `source`."""
    found: list[Expr] = [tirx.const(0, "int64")] * len(source)
    for mine, theirs in common_axes(shape, source):
        position: Expr = at[mine[0]]
        for axis in mine[1:]:
            position = position * shape[axis] + at[axis]
        for axis in reversed(theirs[1:]):
            found[axis] = position % source[axis]
            position = position // source[axis]
        found[theirs[0]] = position
    return found
