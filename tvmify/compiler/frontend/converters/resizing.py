"""Resizes images of any size along one axis: which elements each result is computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler.sizes import Size, as_number, same, sizes_of

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


def resized(
    importer: Importer,
    x: relax.Expr,
    axis: int,
    size: Size,
    factor: float | None,
    nearest: bool,
    aligned: bool,
) -> relax.Expr:
    """Emit the resizing of one axis, which computes positions in the precision of PyTorch.

    Parameters
    ----------
    size
        The new size of the axis.
    factor
        The scale factor, if the program has one.
    nearest
        Whether a result is the nearest element; otherwise it is a mean of two.
    aligned
        Whether the centres of the outermost elements stay in place.
    """
    own = sizes_of(x.ty.shape)
    if same(own[axis], size) and factor in (None, 1.0):
        return x
    whole = int(factor) if nearest and factor is not None and factor.is_integer() else None
    # PyTorch computes with doubles for images of doubles, of which it takes single elements.
    precise = "float64" if nearest and str(x.ty.dtype) == "float64" else "float32"

    # A number in memory: TVM's analysis of indices fails at a quotient of floats.
    steps: list[relax.Expr] = []
    if nearest and whole is None:
        steps = [importer.number(_step(own[axis], size, factor, aligned, precise), precise)]

    def resize(x: te.Tensor, size: Any, *steps: te.Tensor) -> te.Tensor:
        extent = x.shape[axis]
        step = steps[0]() if steps else _step(extent, size, factor, aligned, precise)

        def element(*i: tirx.Var) -> Expr:
            def at(place: Expr) -> Expr:
                return x(*i[:axis], place, *i[axis + 1 :])

            if whole is not None:
                return at(tirx.floordiv(i[axis], whole))
            place = i[axis].astype(precise)
            if nearest:
                return at(tirx.min(tirx.floor(place * step).astype("int64"), extent - 1))
            if aligned:
                source = place * step
            else:
                half = tirx.const(0.5, "float32")
                source = tirx.max((place + half) * step - half, tirx.const(0.0, "float32"))
            first = tirx.min(tirx.floor(source).astype("int64"), extent - 1)
            share = (source - first.astype("float32")).astype(x.dtype)
            second = tirx.min(first + 1, extent - 1)
            return at(first) * (tirx.const(1.0, x.dtype) - share) + at(second) * share

        shape = sizes_of(x.shape)
        shape[axis] = size
        return te.compute(shape, element, name="resized")

    return importer.emit_te(resize, x, size, *steps, primfunc_name_hint="resize")


def _step(extent: Size, size: Size, factor: float | None, aligned: bool, dtype: str) -> Expr:
    """Return the distance, in the image, between adjacent results."""
    if aligned:
        return as_number(extent - 1, dtype) / tirx.max(as_number(size - 1, dtype), 1.0)
    if factor is not None:
        return tirx.const(1.0 / factor, dtype)
    return as_number(extent, dtype) / as_number(size, dtype)
