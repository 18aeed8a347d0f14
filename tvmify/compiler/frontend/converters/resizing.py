"""Resizes images of any size along one axis: which elements each result is computed from."""

from __future__ import annotations

import operator
from functools import reduce
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
    mode: str,
    aligned: bool,
) -> relax.Expr:
    """Emit the resizing of one axis, which computes positions in the precision of PyTorch.

    Parameters
    ----------
    size
        The new size of the axis.
    factor
        The scale factor, if the program has one.
    mode
        What a result is: the "nearest" element, or a mean of two ("bilinear") or four ("bicubic").
    aligned
        Whether the centres of the outermost elements stay in place.
    """
    own, nearest = sizes_of(x.ty.shape), mode == "nearest"
    if same(own[axis], size) and factor in (None, 1.0):
        return x
    whole = int(factor) if nearest and factor is not None and factor.is_integer() else None
    # PyTorch computes with doubles for images of doubles, of which it takes single elements.
    precise = "float64" if nearest and str(x.ty.dtype) == "float64" else "float32"

    # A number in memory: TVM's analysis of indices fails at a quotient of floats.
    steps: list[relax.Expr] = []
    if mode != "bilinear" and whole is None:
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
            half = tirx.const(0.5, "float32")
            source = place * step if aligned else (place + half) * step - half
            if mode == "bicubic":
                first = tirx.floor(source)
                weights = _cubic_weights((source - first).astype(x.dtype))
                places = [first.astype("int64") + tap for tap in range(-1, 3)]
                taps = [at(tirx.max(tirx.min(place, extent - 1), 0)) for place in places]
                return reduce(operator.add, map(operator.mul, taps, weights))
            source = tirx.max(source, tirx.const(0.0, "float32"))
            first = tirx.min(tirx.floor(source).astype("int64"), extent - 1)
            share = (source - first.astype("float32")).astype(x.dtype)
            second = tirx.min(first + 1, extent - 1)
            return at(first) * (tirx.const(1.0, x.dtype) - share) + at(second) * share

        shape = sizes_of(x.shape)
        shape[axis] = size
        return te.compute(shape, element, name="resized")

    return importer.emit_te(resize, x, size, *steps, primfunc_name_hint="resize")


def _cubic_weights(share: Expr) -> list[Expr]:
    """Return the weights of four elements, for a place between the second and the third."""
    one, sharpness = tirx.const(1.0, str(share.ty.dtype)), -0.75

    def near(at: Expr) -> Expr:
        return ((sharpness + 2) * at - (sharpness + 3)) * at * at + one

    def far(at: Expr) -> Expr:
        return ((sharpness * at - 5 * sharpness) * at + 8 * sharpness) * at - 4 * sharpness

    return [far(share + one), near(share), near(one - share), far(one - share + one)]


def _step(extent: Size, size: Size, factor: float | None, aligned: bool, dtype: str) -> Expr:
    """Return the distance, in the image, between adjacent results."""
    if aligned:
        return as_number(extent - 1, dtype) / tirx.max(as_number(size - 1, dtype), 1.0)
    if factor is not None:
        return tirx.const(1.0 / factor, dtype)
    return as_number(extent, dtype) / as_number(size, dtype)
