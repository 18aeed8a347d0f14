"""Layer norms in three passes over each row, for the rule of reductions."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler import sizes


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.nn.layer_norm`` over the last axes, in float32.

    Sums are relative to the first element of the row, so that a common offset costs no digits, and
    rows of equal numbers give zeros. TVM's own kernel rounds the mean of the elements themselves.
    """
    x = call.args[0]
    count = len(call.attrs.axes)
    shape = sizes.sizes_of(x.ty.shape)
    rows, columns = shape[:-count], shape[-count:]

    def layer_norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        size = sizes.as_number(sizes.product(x.shape[-count:]), str(x.dtype))
        epsilon = tirx.const(float(call.attrs.epsilon), x.dtype)
        # A stage of its own: then the others read each row in one way only.
        first = te.compute(rows, lambda *row: x(*row, *[0] * count), name="first")

        def total(name: str, element: Any) -> te.Tensor:
            along = [te.reduce_axis((0, extent), f"k{i}") for i, extent in enumerate(columns)]
            return te.compute(rows, lambda *row: te.sum(element(row, along), axis=along), name=name)

        def shifted(row: Any, at: Any) -> Expr:
            return x(*row, *at) - first(*row)

        def centred(row: Any, at: Any) -> Expr:
            return shifted(row, at) - sums(*row) / size

        sums = total("sums", shifted)
        squares = total("squares", lambda row, at: centred(row, at) * centred(row, at))

        def element(*i: Any) -> Expr:
            row, at = i[: len(rows)], i[len(rows) :]
            scale = tirx.rsqrt(squares(*row) / size + epsilon)
            return centred(row, at) * scale * gamma(*at) + beta(*at)

        return te.compute(shape, element, name="layer_norm")

    return builder.call_te(layer_norm, *call.args, primfunc_name_hint="layer_norm")
