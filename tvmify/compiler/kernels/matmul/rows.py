"""The rows of a product: which leading axes they are, numbered through as one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.sizes import Size


def stacked(right: Sequence[Size], out: Sequence[Size]) -> list[int]:
    """Return the leading axes of a product, `out`, along which there are several right-hand sides.

    Axes of one element next to them are included; if there are only such axes, the list is empty.
    """
    own = [*[1] * (len(out) - len(right)), *right[:-2]]
    if all(map(sizes.is_one, own)):
        return []
    return [
        axis for axis, size in enumerate(own) if not sizes.is_one(size) or sizes.is_one(out[axis])
    ]


def align(index: Sequence[Expr], shape: Sequence[Size]) -> list[Expr]:
    """Index a tensor of leading axes `shape` that is broadcast to more, or larger, axes."""
    own = list(index)[len(index) - len(shape) :] if shape else []
    if len(own) < len(shape):
        own = [tirx.const(0, "int64")] * (len(shape) - len(own)) + own
    return [
        tirx.const(0, "int64") if sizes.is_one(size) else i
        for i, size in zip(own, shape, strict=True)
    ]


def flatten(index: Sequence[Expr], shape: Sequence[Size]) -> Expr:
    """Return the index on the axis that merges all leading axes."""
    number: Expr = tirx.const(0, "int64")
    for i, size in zip(index, shape, strict=True):
        if not sizes.is_one(size):  # TVM cannot invert a sum of axes of one element
            number = number * size + i
    return number


def unflatten(number: Expr, shape: Sequence[Size]) -> list[Expr]:
    """Return the index on each leading axis; the inverse of `flatten`."""
    if not sizes.is_static(*shape) and len(own := not_one(range(len(shape)), shape)) == 1:
        return [number if axis in own else tirx.const(0, "int64") for axis in range(len(shape))]
    index = []
    for size in reversed(shape[1:]):
        index.append(number % size)
        number = number // size
    return [number, *reversed(index)]


def not_one(axes: Iterable[int], extents: Iterable[Size]) -> list[int]:
    """Return the axes of more than one element."""
    return [axis for axis, size in zip(axes, extents, strict=True) if not sizes.is_one(size)]
