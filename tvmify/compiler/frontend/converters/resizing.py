"""Resizes images of any size along one axis: which elements each result is computed from."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.sizes import Size, as_number, is_one, same, sizes_of

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

#: The index of an element, and a share of the way to the next.
_Position: TypeAlias = "tuple[Expr, Any]"


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

    def position(i: tirx.Var, extent: Size, size: Size, steps: Sequence[te.Tensor]) -> _Position:
        step = steps[0]() if steps else _step(extent, size, factor, aligned, precise)
        return _position(i.astype(precise), step, extent, mode, aligned)

    # Along a row, vectors would convert positions from floats, for each row again.
    tables: list[relax.Expr] = []
    if whole is None and all(map(is_one, own[axis + 1 :])):
        for part in range(1 if nearest else 2):

            def table(extent: Any, size: Any, *steps: te.Tensor, part: int = part) -> te.Tensor:
                return te.compute((size,), lambda i: position(i, extent, size, steps)[part])

            opaque = Pattern.OPAQUE.attributes  # not computed again where it is read
            tables.append(importer.emit_te(table, own[axis], size, *steps, primfunc_attrs=opaque))

    def resize(x: te.Tensor, size: Any, *given: te.Tensor) -> te.Tensor:
        extent = x.shape[axis]

        def element(*i: tirx.Var) -> Expr:
            def at(place: Expr) -> Expr:
                return x(*i[:axis], place, *i[axis + 1 :])

            if whole is not None:
                return at(tirx.floordiv(i[axis], whole))
            if tables:
                first, *shares = (table[i[axis]] for table in given)
            else:
                first, *shares = position(i[axis], extent, size, given)
            if nearest:
                return at(first)
            share = shares[0].astype(x.dtype)
            if mode == "bicubic":
                places = [first + tap for tap in range(-1, 3)]
                taps = [at(tirx.max(tirx.min(place, extent - 1), 0)) for place in places]
                return reduce(operator.add, map(operator.mul, taps, _cubic_weights(share)))
            second = tirx.min(first + 1, extent - 1)
            return at(first) * (tirx.const(1.0, x.dtype) - share) + at(second) * share

        shape = sizes_of(x.shape)
        shape[axis] = size
        return te.compute(shape, element, name="resized")

    return importer.emit_te(resize, x, size, *(tables or steps), primfunc_name_hint="resize")


def _position(place: Expr, step: Expr, extent: Size, mode: str, aligned: bool) -> _Position:
    """Return the element that a result is computed from, or the first of several, and how far
    behind that it lies.
    """
    if mode == "nearest":
        return tirx.min(tirx.floor(place * step).astype("int64"), extent - 1), None
    half = tirx.const(0.5, "float32")
    source = place * step if aligned else (place + half) * step - half
    if mode == "bicubic":
        first = tirx.floor(source)
        return first.astype("int64"), source - first
    source = tirx.max(source, tirx.const(0.0, "float32"))
    first = tirx.min(tirx.floor(source).astype("int64"), extent - 1)
    return first, source - first.astype("float32")


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
