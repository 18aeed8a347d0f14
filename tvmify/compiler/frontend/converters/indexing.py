"""Reading at computed indices.

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
    narrow, own = unexpanded(importer, index)  # type: ignore[arg-type]
    kept = [same(size, extent) for size, extent in zip(own, extents, strict=True)]

    def is_known(a: int) -> bool:
        """Whether a size of the result is one of the indices, a number, or one of the tensor."""
        return kept[a] or is_static(extents[a]) or (a != axis and same(extents[a], shape[a]))

    if not all(map(is_known, range(len(shape)))):
        narrow, own, kept = index, extents, [True] * len(shape)  # type: ignore[assignment]
    at = positions(importer, narrow, source, axis, wrap=False)  # type: ignore[arg-type]
    at = importer.emit(relax.op.reshape(at, list(own)))

    def gathered(x: te.Tensor, where: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            return x(*i[:axis], broadcast_at(where, i), *i[axis + 1 :])

        out = [
            where.shape[a] if kept[a] else extent if is_static(extent) else x.shape[a]
            for a, extent in enumerate(extents)
        ]
        return te.compute(out, element, name="gather")

    return importer.emit_te(gathered, importer.tensor(source), at)


def _from_scalar(importer: Importer, node: fx.Node, source: fx.Node, index: fx.Node) -> relax.Expr:
    """Read a tensor without axes, which is treated as an axis of one element."""
    at = positions(importer, index, source, 0, wrap=False)
    out = list(importer.shape(node))
    at = importer.emit(relax.op.reshape(at, [product(out)]))
    line = importer.emit(relax.op.reshape(importer.tensor(source), [1]))
    return relax.op.reshape(importer.emit_te(take, line, at, 0), out)


def unexpanded(importer: Importer, index: fx.Node) -> tuple[fx.Node, list[Size]]:
    """Return what an index is expanded from, as that of nodes in a graph whose features are read or
    written, and its shape with an axis for each axis of the index; or the index itself.
    """
    shape = list(importer.shape(index))
    if index.target is not torch.ops.aten.expand.default:
        return index, shape
    (source,) = index.all_input_nodes[:1]
    own = importer.shape(source)
    return source, [*[1] * (len(shape) - len(own)), *own]


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
            found = iter(broadcast_at(w, common) for w in where)
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


def broadcast_at(index: te.Tensor, place: Indices) -> Any:
    """Read an index, at a place of the shape that it is broadcast to.

    It is cast to int64, the type of the places of tensors, so that what it reads can be inlined.
    """
    last = place[len(place) - len(index.shape) :]
    found = index(*(0 if is_one(e) else i for e, i in zip(index.shape, last, strict=True)))
    return found.astype("int64")
