"""Reading and writing at computed indices.

Indices are checked before use: eager raises an ``IndexError`` for one out of range, where compiled
code would access memory out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.frontend import places
from tvmify.compiler.frontend.constants import constant_of
from tvmify.compiler.frontend.converters import loops
from tvmify.compiler.frontend.converters.registry import call_loop, converts, dtype_of
from tvmify.compiler.sizes import (
    Size,
    bounds,
    is_one,
    is_static,
    product,
    same,
    same_shape,
)
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

Indices = tuple[Any, ...]


def positions(
    importer: Importer, index: fx.Node, source: fx.Node, axis: int, *, wrap: bool
) -> relax.Expr:
    """Return an index tensor whose values are checked to lie within an axis and not negative.

    Parameters
    ----------
    index
        A node with integer values.
    source, axis
        The indexed tensor and axis; a tensor without axes counts as one of one element.
    wrap
        Whether negative indices count from the end.
    """
    x, shape = importer.tensor(index), importer.shape(index)
    whole = importer.shape(source) or (1,)
    extent = whole[axis]
    if not index.meta["val"].dtype.is_signed or index.meta["val"].dtype is torch.bool:
        raise UnsupportedOperator(
            ["aten.index.Tensor"], "an index is a mask or has unsigned integers"
        )
    if 0 in shape:
        return x
    constant = constant_of(importer.program, index)
    if constant is not None and constant.min() >= 0 and constant.max() < bounds(extent)[0]:
        return x
    count = product(shape)
    given = [importer.emit(relax.op.reshape(x, [count]))]
    if not is_static(extent):
        given.append(importer.tensor(source))
    dtypes = dtype_of(x), dtype_of(given[-1])
    check = loops.check_positions(count, whole, axis, dtypes, wrap=wrap)
    checked = call_loop(importer, check, "check_positions", given, count)
    return importer.emit(relax.op.reshape(checked, list(shape)))


@converts("embedding.default")
def embedding(importer: Importer, node: fx.Node) -> relax.Expr:
    table, index = node.args[:2]
    at = positions(importer, index, table, 0, wrap=False)  # type: ignore[arg-type]
    return importer.emit_te(take, importer.tensor(table), at, 0)


@converts("index_select.default")
def index_select(importer: Importer, node: fx.Node) -> relax.Expr:
    source, axis, index = node.args
    shape = importer.shape(source)
    if not shape:
        return _from_scalar(importer, node, source, index)  # type: ignore[arg-type]
    axis = int(axis) % len(shape)  # type: ignore[arg-type]
    at = positions(importer, index, source, axis, wrap=False)  # type: ignore[arg-type]
    return importer.emit_te(take, importer.tensor(source), at, axis)


@converts("gather.default")
def gather(importer: Importer, node: fx.Node) -> relax.Expr:
    source, axis, index = node.args[:3]
    shape = importer.shape(source)
    if not shape:
        return _from_scalar(importer, node, source, index)  # type: ignore[arg-type]
    axis = int(axis) % len(shape)  # type: ignore[arg-type]
    extents = importer.shape(index)  # type: ignore[arg-type]
    pairs = list(enumerate(zip(extents, shape, strict=True)))
    # Other sizes of the result are those of one of the kernel's arguments.
    known = all(a == axis or is_static(size) or same(size, own) for a, (size, own) in pairs)
    line = _line(importer, index, axis, extents) if known else None  # type: ignore[arg-type]
    at = positions(importer, line or index, source, axis, wrap=False)  # type: ignore[arg-type]
    if line is not None:
        at = importer.emit(relax.op.reshape(at, [extents[axis]]))

    def gathered(x: te.Tensor, where: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            return x(*i[:axis], where(*i), *i[axis + 1 :])

        return te.compute(where.shape, element, name="gather")

    def rows(x: te.Tensor, where: te.Tensor) -> te.Tensor:
        out = [x.shape[a] if same(size, own) else size for a, (size, own) in pairs]
        out[axis] = where.shape[0]

        def element(*i: Any) -> Any:
            return x(*i[:axis], where(i[axis]), *i[axis + 1 :])

        return te.compute(out, element, name="gather")

    kernel = gathered if line is None else rows
    return importer.emit_te(kernel, importer.tensor(source), at)


def _from_scalar(importer: Importer, node: fx.Node, source: fx.Node, index: fx.Node) -> relax.Expr:
    """Read a tensor without axes, which is treated as an axis of one element."""
    at = positions(importer, index, source, 0, wrap=False)
    out = list(importer.shape(node))
    at = importer.emit(relax.op.reshape(at, [product(out)]))
    line = importer.emit(relax.op.reshape(importer.tensor(source), [1]))
    return relax.op.reshape(importer.emit_te(take, line, at, 0), out)


def _line(importer: Importer, index: fx.Node, axis: int, shape: Sequence[Size]) -> fx.Node | None:
    """Return what an index is expanded from, if it varies along one axis and covers all others, as
    that of nodes in a graph whose features are gathered or scattered.
    """
    if index.target is not torch.ops.aten.expand.default:
        return None
    source, extents = index.args[0], importer.shape(index)
    assert isinstance(source, fx.Node)
    own = importer.shape(source)
    own = [*[1] * (len(extents) - len(own)), *own]
    others = [a for a in range(len(extents)) if a != axis]
    is_line = same(own[axis], extents[axis]) and all(
        same(own[a], 1) and same(extents[a], shape[a]) for a in others
    )
    return source if is_line else None


@converts("index.Tensor")
def index_tensor(importer: Importer, node: fx.Node) -> relax.Expr:
    """NumPy's advanced indexing by integers.

    The index tensors are broadcast against each other; their axes replace the first indexed axis,
    or come first if an axis that is not indexed lies between indexed ones.
    """
    source, indices = node.args
    shape, out = importer.shape(source), importer.shape(node)
    indexed = [axis for axis, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    known = constant_of(importer.program, indices[indexed[0]])  # type: ignore[index]
    if len(indexed) == 1 and known is not None:
        found = places.formula_of(known, shape[indexed[0]])
        if found is not None:
            return importer.emit_te(reading({indexed[0]: found}, out), importer.tensor(source))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if adjacent else 0
    chosen = [indices[a] for a in indexed]  # type: ignore[index]
    rank = max(len(importer.shape(index)) for index in chosen)
    if not is_static(*out, *(shape[a] for a in indexed)):
        known_at = importer.formulas.places(
            chosen, out[first : first + rank], [shape[a] for a in indexed]
        )
        if known_at is not None:

            def read(x: te.Tensor) -> te.Tensor:
                def element(*i: Any) -> Any:
                    found, rest = (
                        iter(known_at(i[first : first + rank])),
                        iter(i[:first] + i[first + rank :]),
                    )
                    return x(
                        *(next(found) if a in indexed else next(rest) for a in range(len(shape)))
                    )

                return te.compute(out, element, name="index")

            return importer.emit_te(read, importer.tensor(source), primfunc_name_hint="index")
    at = [positions(importer, indices[a], source, a, wrap=True) for a in indexed]  # type: ignore[index]

    def taken(x: te.Tensor, *where: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            common, rest = i[first : first + rank], iter(i[:first] + i[first + rank :])
            found = iter(_broadcast(w, common) for w in where)
            return x(*(next(found) if a in indexed else next(rest) for a in range(len(shape))))

        return te.compute(out, element, name="index")

    return importer.emit_te(taken, importer.tensor(source), *at)


@converts(*(f"reflection_pad{rank}d.default" for rank in (1, 2, 3)), mirrors=True)
@converts(*(f"replication_pad{rank}d.default" for rank in (1, 2, 3)), mirrors=False)
def pad_with_own(importer: Importer, node: fx.Node, *, mirrors: bool) -> relax.Expr:
    """Padding that replicates or reflects the border; a negative width crops."""
    shape, out = importer.shape(node.args[0]), importer.shape(node)
    widths: list[Any] = list(node.args[1])[::2]  # type: ignore[arg-type]
    axes = range(len(shape) - 1, -1, -1)
    known = {}
    for axis, before in zip(axes, widths, strict=False):
        if is_static(out[axis], shape[axis], before):
            at, last = torch.arange(out[axis]) - before, shape[axis] - 1
            at = last - (last - at.abs()).abs() if mirrors else at.clamp(0, last)
            known[axis] = places.formula(at.tolist())

    def padded(x: te.Tensor, widths: list[Any]) -> te.Tensor:
        borders = {
            axis: places.border(before, x.shape[axis], mirrors)
            for axis, before in zip(axes, widths, strict=False)
        }
        return reading(borders | known, out)(x)

    return importer.emit_te(
        padded, importer.tensor(node.args[0]), widths, primfunc_name_hint="read"
    )


@converts("one_hot.default")
def one_hot(importer: Importer, node: fx.Node) -> relax.Expr:
    shape = importer.shape(node)
    at = positions(importer, node.args[0], node, -1, wrap=False)  # type: ignore[arg-type]

    def one_hot_of(where: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            return tirx.Cast("int64", where(*i[:-1]) == i[-1])

        return te.compute(shape, element, name="one_hot")

    return importer.emit_te(one_hot_of, at)


@converts("scatter.src", "scatter.value", add=False)
@converts("scatter_add.default", add=True)
def scatter(importer: Importer, node: fx.Node, *, add: bool) -> relax.Expr:
    source, axis, index, values = node.args
    shape, dtype = importer.shape(source), node.meta["val"].dtype
    if not shape:
        raise UnsupportedOperator([str(node.target)], "the tensor has no axes")
    axis = int(axis) % len(shape)  # type: ignore[arg-type]
    extents = importer.shape(index)
    # Whole rows are written at once, if they are rows of memory.
    line = None if axis else _line(importer, index, axis, shape)  # type: ignore[arg-type]
    at = positions(importer, line or index, source, axis, wrap=False)  # type: ignore[arg-type]

    def offsets(where: te.Tensor, shape: Sequence[Any]) -> te.Tensor:
        def element(*i: Any) -> Any:
            return _flat(shape, (*i[:axis], where(*i), *i[axis + 1 :]))

        return te.compute(extents, element, name="offsets")

    if isinstance(values, fx.Node):

        def first(x: te.Tensor) -> te.Tensor:
            return te.compute(extents, lambda *i: x[i], name="first")

        part = importer.tensor(values, dtype)
        if not same_shape(part.ty.shape, extents):
            part = importer.emit_te(first, part)
    else:
        part = importer.emit(relax.op.full(list(extents), importer.tensor(values, dtype)))
    if line is not None:
        at = importer.emit(relax.op.reshape(at, extents[:1]))
        return _write(importer, source, at, part, len(shape) - 1, add)
    return _write(importer, source, importer.emit_te(offsets, at, list(shape)), part, 0, add)


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
    common = _broadcast_shape([importer.shape(index) for index in chosen])

    def offsets(shape: Sequence[Any], *where: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            places = (_broadcast(w, i[first:]) for w in where)
            return _flat(shape, (*i[:first], *places))

        return te.compute([*shape[:first], *common], element, name="offsets")

    written = [*shape[:first], *common, *shape[last:]]
    part = importer.emit(relax.op.broadcast_to(importer.tensor(values, dtype), written))
    runs = importer.emit_te(offsets, list(shape[:last]), *at)
    return _write(importer, source, runs, part, len(shape) - last, add)


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


def _write(
    importer: Importer,
    source: Any,
    offsets: relax.Expr,
    values: relax.Expr,
    inner_axes: int,
    add: bool,
) -> relax.Expr:
    """Copy a tensor, and write at the given places, in order.

    What is written at a place, counted in row-major order over the other axes, are the elements of
    the last `inner_axes` axes.
    """
    shape = importer.shape(source)
    whole, count = product(shape), product(offsets.ty.shape)
    x = importer.tensor(source)
    if is_static(whole, count) and whole * count == 0:
        return x
    rows = product(shape[: len(shape) - inner_axes])
    inner = product(shape[len(shape) - inner_axes :])
    function = loops.write_runs(rows, count, inner, (dtype_of(x), dtype_of(offsets)), add=add)
    given = [
        importer.emit(relax.op.reshape(tensor, sizes))
        for tensor, sizes in ((x, [rows, inner]), (offsets, [count]), (values, [count, inner]))
    ]
    written = call_loop(importer, function, "write_runs", given, [rows, inner])
    return relax.op.reshape(written, list(shape))


def reading(
    found: Mapping[int, places.Formula], shape: Sequence[int]
) -> Callable[[te.Tensor], te.Tensor]:
    """Return a function that reads a tensor, with the indices of some axes given by formulas."""

    def read(x: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            return x(*(found[axis](at) if axis in found else at for axis, at in enumerate(i)))

        return te.compute(shape, element, name="read")

    return read


def take(x: te.Tensor, index: te.Tensor, axis: int) -> te.Tensor:
    rank = len(index.shape)

    def element(*i: Any) -> Any:
        return x(*i[:axis], index(*i[axis : axis + rank]), *i[axis + rank :])

    shape = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    return te.compute(shape, element, name="take")


def _broadcast(x: te.Tensor, indices: Indices) -> Any:
    """Read a tensor at indices of the shape that it is broadcast to."""
    last = indices[len(indices) - len(x.shape) :]
    return x(*(0 if is_one(e) else i for e, i in zip(x.shape, last, strict=True)))


def _broadcast_shape(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the shape that tensors are broadcast to."""
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [
        next((size for size in sizes if not is_one(size)), 1) for sizes in zip(*padded, strict=True)
    ]


def _flat(shape: tuple[int, ...], indices: Indices) -> Any:
    """Return the position of an element in row-major order."""
    position: Any = tirx.const(0, "int64")
    for extent, index in zip(shape, indices, strict=True):
        position = position * extent + index.astype("int64")
    return position
