"""Operators on the bits of numbers: logic, shifts, and views as another type."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from tvm import relax, te, tirx

from tvmify.compiler.aten.operators import base_name
from tvmify.compiler.frontend.converters.promotion import promoted
from tvmify.compiler.frontend.converters.registry import converts, dtype_of
from tvmify.compiler.frontend.dtypes import DTYPES
from tvmify.compiler.kernels.elementwise.scalar import elementwise
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name, wrapped

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

#: On integers, and on bools.
LOGIC = {
    "bitwise_and": (relax.op.bitwise_and, relax.op.logical_and),
    "bitwise_not": (relax.op.bitwise_not, relax.op.logical_not),
    "bitwise_or": (relax.op.bitwise_or, relax.op.logical_or),
    "bitwise_xor": (relax.op.bitwise_xor, relax.op.logical_xor),
}
SHIFTS = (
    *(f"__{side}shift__.{kind}" for side in "lr" for kind in ("Scalar", "Tensor")),
    *(
        f"bitwise_{side}_shift.{kind}"
        for side in ("left", "right")
        for kind in ("Scalar_Tensor", "Tensor", "Tensor_Scalar")
    ),
)


@converts(*(f"{name}.{kind}" for name in LOGIC for kind in ("Tensor", "Scalar", "default")))
def logic(importer: Importer, node: fx.Node) -> relax.Expr:
    on_integers, on_booleans = LOGIC[base_name(node)]
    dtype = node.meta["val"].dtype
    function = on_booleans if dtype is torch.bool else on_integers
    return function(*(importer.tensor(value, dtype) for value in node.args))


@converts(*SHIFTS)
def shift(importer: Importer, node: fx.Node) -> relax.Expr:
    """As in torch, a shift by a negative number, or by all bits, leaves zeros; to the right, the
    sign.
    """
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or dtype is torch.bool:
        raise UnsupportedOperator([str(node.target)], f"it shifts {dtype_name(dtype)}")
    x, count = promoted(importer, node.args, PROMOTION.DEFAULT)
    last = 8 * dtype.itemsize - 1
    is_left = base_name(node) in ("__lshift__", "bitwise_left_shift")

    def shifted(x: Any, count: Any) -> Any:
        shift = tirx.shift_left if is_left else tirx.shift_right
        zeros, every = (tirx.const(number, str(x.ty.dtype)) for number in (0, last))
        beyond = zeros if is_left or not dtype.is_signed else x >> every
        return tirx.Select(tirx.all(count >= 0, count <= every), shift(x, count & every), beyond)

    def by_number(x: Any) -> Any:
        return shifted(x, tirx.const(number, str(x.ty.dtype)))

    number = wrapped(node.args[1], dtype)
    if isinstance(number, int):  # an argument would be loaded, and compared, for each element
        return importer.emit_te(elementwise(by_number), x, primfunc_name_hint="shift")
    return importer.emit_te(elementwise(shifted), x, count, primfunc_name_hint="shift")


@converts("view.dtype")
def view_as(importer: Importer, node: fx.Node) -> relax.Expr:
    """Along the last axis, elements are cut into smaller ones or joined to larger ones, the low
    bits first, as processors that PyTorch supports keep them in memory.
    """
    source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    dtype, shape = dtype_name(result), importer.shape(node)
    if dtype not in DTYPES or (result is torch.bool and source is not result):
        raise UnsupportedOperator([str(node.target)], f"it reads bits as {dtype}")
    x = importer.tensor(node.args[0])
    if dtype_of(x) == dtype:
        return x
    if source is torch.bool:
        x = importer.emit(relax.op.astype(x, "uint8"))
    bits, new_bits = 8 * source.itemsize, 8 * result.itemsize

    def same_width(x: te.Tensor) -> te.Tensor:
        return te.compute(
            shape, lambda *i: tirx.reinterpret(dtype, _bits(x(*i), source)), name="same_width"
        )

    def cut(x: te.Tensor) -> te.Tensor:
        parts = bits // new_bits

        def element(*i: Any) -> Any:
            whole = _bits(x(*i[:-1], i[-1] // parts), source)
            part = whole >> (i[-1] % parts * new_bits).astype(f"uint{bits}")
            return tirx.reinterpret(dtype, part.astype(f"uint{new_bits}"))

        return te.compute(shape, element, name="cut")

    def joined(x: te.Tensor) -> te.Tensor:
        parts = new_bits // bits

        def element(*i: Any) -> Any:
            def part(place: int) -> Any:
                own = _bits(x(*i[:-1], i[-1] * parts + place), source)
                wide = own.astype(f"uint{new_bits}")
                return wide << tirx.const(place * bits, f"uint{new_bits}")

            return tirx.reinterpret(dtype, reduce(or_, map(part, range(parts))))

        return te.compute(shape, element, name="joined")

    view = same_width if bits == new_bits else cut if bits > new_bits else joined
    return importer.emit_te(view, x)


def _bits(value: Any, dtype: torch.dtype) -> Any:
    """Return the bits of a number as an integer without sign."""
    if dtype is torch.bfloat16:  # TVM takes such elements for float32
        return (tirx.reinterpret("uint32", value.astype("float32")) >> 16).astype("uint16")
    return tirx.reinterpret(f"uint{8 * dtype.itemsize}", value)
