"""Writing at computed indices, which are checked as those that are read (see `indexing`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.frontend.converters import loops
from tvmify.compiler.frontend.converters.indexing import broadcast_at, positions, unexpanded
from tvmify.compiler.frontend.converters.registry import call_loop, converts, dtype_of
from tvmify.compiler.frontend.dtypes import dtype_name
from tvmify.compiler.sizes import Size, is_one, is_static, product, same, same_shape
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


class _Places(NamedTuple):
    """Where runs of consecutive elements are written.

    Attributes
    ----------
    offsets
        The run of the tensor that each one is written to, in row-major order.
    shape
        The shape of what is written.
    inner_axes
        How many of the last axes make a run.
    """

    offsets: relax.Expr
    shape: Sequence[Size]
    inner_axes: int


@converts("scatter.src", "scatter.value", join=None)
@converts("scatter_add.default", join="sum")
def scatter(importer: Importer, node: fx.Node, *, join: str | None) -> relax.Expr:
    source, axis, index, values = node.args
    places = _scattered(importer, node, source, axis, index)
    part = _part(importer, values, node.meta["val"].dtype, places.shape)
    return _write(importer, importer.tensor(source), places, part, join)


@converts("scatter_reduce.two")
def scatter_reduce(importer: Importer, node: fx.Node) -> relax.Expr:
    source, axis, index, values, how = node.args[:5]
    dtype, with_self = node.meta["val"].dtype, importer.argument(node, "include_self")
    if dtype is torch.bool:
        raise UnsupportedOperator([str(node.target)], "booleans are reduced")
    is_mean = how == "mean"
    join = "sum" if is_mean else str(how)
    places = _scattered(importer, node, source, axis, index)
    x, name = importer.tensor(source), dtype_name(dtype)

    def everywhere(value: float, shape: Sequence[Size]) -> relax.Expr:
        return importer.emit(relax.op.full(list(shape), relax.const(value, name)))

    if not with_self:
        start = everywhere(_neutral(join, dtype), places.shape)
        x = importer.emit(_write(importer, x, places, start, None))
    joined = _write(importer, x, places, _part(importer, values, dtype, places.shape), join)
    if not is_mean:
        return joined
    # As eager counts: in the dtype of the elements.
    counts = everywhere(int(with_self), importer.shape(source))
    count = _write(importer, counts, places, everywhere(1, places.shape), "sum")
    count = importer.emit(relax.op.maximum(importer.emit(count), relax.const(1, name)))
    divide = relax.op.divide if dtype.is_floating_point else relax.op.floor_divide
    return divide(importer.emit(joined), count)


@converts("index_add.default")
def index_add(importer: Importer, node: fx.Node) -> relax.Expr:
    source, axis, index, values = node.args[:4]
    dtype, shape = node.meta["val"].dtype, importer.shape(source)
    alpha = importer.argument(node, "alpha")
    if not shape or (dtype is torch.bool and alpha != 1):
        raise UnsupportedOperator([str(node.target)], "no axes, or booleans with a factor")
    axis = int(axis) % len(shape)  # type: ignore[arg-type]
    part = importer.tensor(values, dtype)
    if alpha != 1:
        part = importer.emit(relax.op.multiply(part, importer.tensor(alpha, dtype)))
    at = positions(importer, index, source, axis, wrap=False)  # type: ignore[arg-type]
    places = _runs(importer, shape, axis, [at])
    return _write(importer, importer.tensor(source), places, part, "sum")


@converts("index_put.default")
def index_put(importer: Importer, node: fx.Node) -> relax.Expr:
    source, indices, values = node.args[:3]
    add = bool(importer.argument(node, "accumulate"))
    indexed = [axis for axis, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    first, last = indexed[0], indexed[-1] + 1
    if indexed != list(range(first, last)):
        raise UnsupportedOperator(
            [str(node.target)], "an axis between two indexed ones is not indexed"
        )
    shape, dtype = importer.shape(source), node.meta["val"].dtype
    chosen = [indices[axis] for axis in indexed]  # type: ignore[index]
    if not add and len(chosen) == 1 and len(importer.shape(chosen[0])) == 1:
        return _write_rows(importer, node, first, chosen[0], values)
    at = [positions(importer, indices[a], source, a, wrap=True) for a in indexed]  # type: ignore[index]
    places = _runs(importer, shape, first, at)
    part = relax.op.broadcast_to(importer.tensor(values, dtype), list(places.shape))
    join = "sum" if add else None
    return _write(importer, importer.tensor(source), places, importer.emit(part), join)


def _write_rows(
    importer: Importer, node: fx.Node, axis: int, index: fx.Node, values: Any
) -> relax.Expr:
    """Write at some indices of one axis: in the caller's memory, if all that is allowed."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    at = positions(importer, index, source, axis, wrap=True)
    shape, (count,) = importer.shape(source), importer.shape(index)
    x = importer.tensor(source)
    if is_static(product(shape) * count) and product(shape) * count == 0:
        return x
    part = importer.tensor(values, node.meta["val"].dtype)
    written = [*shape[:axis], count, *shape[axis + 1 :]]
    part = importer.emit(relax.op.broadcast_to(part, written))
    in_place = node in importer.in_place
    dtypes = dtype_of(x), dtype_of(at)
    function = loops.write_rows(shape, axis, count, dtypes, in_place=in_place)
    return call_loop(importer, function, "write_rows", [x, at, part], shape, in_place=in_place)


def _scattered(importer: Importer, node: fx.Node, source: Any, axis: Any, index: Any) -> _Places:
    """Return the places of a scatter."""
    shape, extents = importer.shape(source), importer.shape(index)
    if not shape:
        raise UnsupportedOperator([str(node.target)], "the tensor has no axes")
    axis = int(axis) % len(shape)
    narrow, own = unexpanded(importer, index)
    others = [a for a in range(len(shape)) if a != axis]
    is_whole = all(is_one(own[a]) and same(extents[a], shape[a]) for a in others)
    if is_whole and same(own[axis], extents[axis]):
        at = positions(importer, narrow, source, axis, wrap=False)
        return _runs(importer, shape, axis, [importer.emit(relax.op.reshape(at, [own[axis]]))])
    at = positions(importer, index, source, axis, wrap=False)

    def offsets(where: te.Tensor, shape: Sequence[Any]) -> te.Tensor:
        def element(*i: Any) -> Any:
            return _flat(shape, (*i[:axis], where(*i), *i[axis + 1 :]))

        return te.compute(extents, element, name="offsets")

    return _Places(importer.emit_te(offsets, at, list(shape)), extents, 0)


def _runs(
    importer: Importer, shape: Sequence[Size], first: int, at: Sequence[relax.Expr]
) -> _Places:
    """Return the places at checked indices of consecutive axes, broadcast against each other.

    Parameters
    ----------
    shape
        The shape of the tensor.
    first
        The first of the axes.
    at
        The indices of each axis.
    """
    last = first + len(at)
    common = _broadcast_shape([tuple(index.ty.shape) for index in at])
    written = [*shape[:first], *common, *shape[last:]]
    if last == 1:
        return _Places(at[0], written, len(shape) - 1)

    def offsets(shape: Sequence[Any], *where: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            places = (broadcast_at(w, i[first:]) for w in where)
            return _flat(shape, (*i[:first], *places))

        return te.compute([*shape[:first], *common], element, name="offsets")

    found = importer.emit_te(offsets, list(shape[:last]), *at)
    return _Places(found, written, len(shape) - last)


def _part(
    importer: Importer, values: Any, dtype: torch.dtype, extents: Sequence[Size]
) -> relax.Expr:
    """Return the first elements of a tensor along each axis, or a number for all of them."""
    x = importer.tensor(values, dtype)
    if not isinstance(values, fx.Node):
        return importer.emit(relax.op.full(list(extents), x))

    def first(x: te.Tensor) -> te.Tensor:
        return te.compute(extents, lambda *i: x[i], name="first")

    return x if same_shape(x.ty.shape, extents) else importer.emit_te(first, x)


def _write(
    importer: Importer, x: relax.Expr, places: _Places, values: relax.Expr, join: str | None
) -> relax.Expr:
    """Copy a tensor, and write at places, in order; `join` is as for `loops.write_runs`."""
    dtype = dtype_of(x)
    if join in ("sum", "prod") and dtype in ("float16", "bfloat16"):  # as eager, one rounding
        x, values = (importer.emit(relax.op.astype(given, "float32")) for given in (x, values))
        return relax.op.astype(importer.emit(_write(importer, x, places, values, join)), dtype)
    shape, inner_axes = list(x.ty.shape), places.inner_axes
    whole, count = product(shape), product(places.offsets.ty.shape)
    if is_static(whole, count) and whole * count == 0:
        return x
    rows = product(shape[: len(shape) - inner_axes])
    inner = product(shape[len(shape) - inner_axes :])
    dtypes = dtype, dtype_of(places.offsets)
    function = loops.write_runs(rows, count, inner, dtypes, join)
    given = [
        importer.emit(relax.op.reshape(tensor, sizes))
        for tensor, sizes in (
            (x, [rows, inner]),
            (places.offsets, [count]),
            (values, [count, inner]),
        )
    ]
    written = call_loop(importer, function, "write_runs", given, [rows, inner])
    return relax.op.reshape(written, shape)


def _neutral(join: str, dtype: torch.dtype) -> float:
    """Return the number that joins others without changing them."""
    if join in ("sum", "prod"):
        return int(join == "prod")
    sign = -1 if join == "amax" else 1
    if dtype.is_floating_point:
        return sign * math.inf
    limits = torch.iinfo(dtype)
    return limits.min if sign < 0 else limits.max


def _broadcast_shape(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the shape that tensors are broadcast to."""
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [
        next((size for size in sizes if not is_one(size)), 1) for sizes in zip(*padded, strict=True)
    ]


def _flat(shape: Sequence[Any], indices: Sequence[Any]) -> Any:
    """Return the position of an element in row-major order."""
    position: Any = tirx.const(0, "int64")
    for extent, index in zip(shape, indices, strict=True):
        position = position * extent + index.astype("int64")
    return position
