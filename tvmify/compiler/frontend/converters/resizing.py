"""Resizes images of any size along one axis: which elements each result is computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler.sizes import Size, as_number, same, sizes_of
from tvmify.errors import UnsupportedOperator

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
    """Emit the resizing of one axis, which computes positions in single precision as PyTorch does.

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

    Raises
    ------
    UnsupportedOperator
        The mode is "nearest", and the factor is not an integer.
    """
    own = sizes_of(x.ty.shape)
    if same(own[axis], size) and factor in (None, 1.0):
        return x
    whole = int(factor) if nearest and factor is not None and factor.is_integer() else None
    if nearest and not whole:
        raise UnsupportedOperator(["aten.upsample_nearest2d.vec"], "its scale factor is not known")

    def resize(x: te.Tensor, size: Any) -> te.Tensor:
        extent = x.shape[axis]
        step = _step(extent, size, factor, aligned)

        def element(*i: tirx.Var) -> Expr:
            def at(place: Expr) -> Expr:
                return x(*i[:axis], place, *i[axis + 1 :])

            if whole is not None:
                return at(tirx.floordiv(i[axis], whole))
            place = i[axis].astype("float32")
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

    return importer.emit_te(resize, x, size, primfunc_name_hint="resize")


def _step(extent: Size, size: Size, factor: float | None, aligned: bool) -> Expr:
    """Return the distance, in the image, between adjacent results."""
    if aligned:
        return as_number(extent - 1, "float32") / tirx.max(as_number(size - 1, "float32"), 1.0)
    if factor is not None:
        return tirx.const(1.0 / factor, "float32")
    return as_number(extent, "float32") / as_number(size, "float32")
