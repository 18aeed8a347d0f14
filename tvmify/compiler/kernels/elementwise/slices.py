"""Slices of tensors with symbols among their sizes, whose own bounds are numbers.

TVM would take the bounds for symbols, too, and describe the result in terms of them.
"""

from __future__ import annotations

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import plain
from tvmify.compiler.sizes import Size


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.strided_slice``."""
    x, axes, begins, _, *strides = call.args
    if sizes.is_static(*x.ty.shape.values, *call.ty.shape.values):
        return plain(builder, call)
    rank = len(x.ty.shape)
    first: list[Size] = [0] * rank
    step = [1] * rank
    for place, axis in enumerate(int(axis) % rank for axis in axes.fields):
        first[axis] = sizes.number_or_expression(begins.fields[place])
        by = strides[0].fields[place] if strides else 1
        if not sizes.is_static(by) or int(by) < 1:
            return plain(builder, call)
        step[axis] = int(by)

    def sliced(x: te.Tensor) -> te.Tensor:
        # Shapes are in symbols of the function; a start is in symbols of the program.
        own = {v.name: v for size in x.shape for v in sizes.variables_of(size)}

        def place(at: Expr, size: Size, start: Size, by: int) -> Expr:
            if isinstance(start, int) and start < 0:
                return at * by + (size + start)
            return at * by + sizes.with_variables(start, own)

        def element(*at: tirx.Var) -> Expr:
            return x(*map(place, at, x.shape, first, step))

        return te.compute(call.ty.shape.values, element, name="strided_slice")

    return builder.call_te(sliced, x, primfunc_name_hint="strided_slice")
