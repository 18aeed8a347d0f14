"""Operators that move elements without computing: concatenation, padding, filling."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler.aten.operators import arguments
from tvmify.compiler.frontend.converters.registry import converts, dtype_of
from tvmify.compiler.sizes import (
    bounds,
    ceil_div,
    is_static,
    same,
    same_shape,
)
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


@converts("getitem")
def getitem(importer: Importer, node: fx.Node) -> Any:
    source, index = node.args
    return operator.getitem(importer.env[source], index)  # type: ignore[index]


@converts("cat.default", with_complex=True)
def concatenate(importer: Importer, node: fx.Node) -> relax.Expr:
    dtype = node.meta["val"].dtype
    axis = int(importer.argument(node, "dim")) % len(importer.shape(node))
    # torch accepts an empty vector as an empty tensor of any rank.
    given = [p for p in node.args[0] if importer.shape(p) != (0,) or len(importer.shape(node)) == 1]  # type: ignore[union-attr]
    # A part without elements would be a kernel without threads.
    parts = [part for part in given if importer.shape(part)[axis] != 0] or given[:1]
    tensors = [importer.tensor(part, dtype) for part in parts]
    if len(tensors) == 1:
        return tensors[0]
    lengths = [importer.shape(part)[axis] for part in parts]
    if is_static(*lengths):
        return relax.op.concat(tensors, axis)
    return _symbolic_concatenation(importer, tensors, axis, lengths, importer.held_shape(node))


def _symbolic_concatenation(
    importer: Importer,
    tensors: list[relax.Expr],
    axis: int,
    lengths: list[Any],
    out: list[Any],
) -> relax.Expr:
    """Concatenate along an axis of symbolic size. TVM's own operator adds the sizes in another
    order than elsewhere, and then considers the two shapes different.
    """

    def joined(ends: list[Any], *parts: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            def of(part: int) -> Any:
                start = ends[part - 1] if part else 0
                own = parts[part](*i[:axis], i[axis] - start, *i[axis + 1 :])
                if part == len(parts) - 1:
                    return own
                return tirx.if_then_else(i[axis] < ends[part], own, of(part + 1))

            return of(0)

        return te.compute(out, element, name="concatenate")

    ends = list(accumulate(lengths))
    return importer.emit_te(joined, ends, *tensors, primfunc_name_hint="concatenate")


@converts("permute.default", with_complex=True)
def permute(importer: Importer, node: fx.Node) -> relax.Expr:
    source, axes = node.args
    rank = len(importer.shape(source))
    axes = [int(axis) % rank for axis in axes]  # type: ignore[union-attr]
    x = importer.tensor(source)
    if axes == list(range(rank)):
        return x
    parts = range(rank, len(x.ty.shape))  # of complex numbers
    return relax.op.permute_dims(x, [*axes, *parts])


@converts("expand.default", with_complex=True)
def expand(importer: Importer, node: fx.Node) -> relax.Expr:
    return relax.op.broadcast_to(importer.tensor(node.args[0]), importer.held_shape(node))


@converts(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "unsqueeze.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    with_complex=True,
)
def reshape(importer: Importer, node: fx.Node) -> relax.Expr:
    """All operators that keep the order of elements, given by the shape of the result."""
    x, shape = importer.tensor(node.args[0]), importer.held_shape(node)
    if same_shape(shape, x.ty.shape.values):
        return x  # a reshape would stop the layout of convolutions from propagating
    if 0 in shape:  # to Relax, a zero means "keep this extent"
        return relax.op.zeros(shape, dtype_of(x))
    return relax.op.reshape(x, shape)


@converts("full.default", "full_like.default", "new_full.default", name="fill_value")
@converts("fill.Scalar", name="value")
@converts("scalar_tensor.default", name="s")
def fill_with_argument(importer: Importer, node: fx.Node, *, name: str) -> relax.Expr:
    return fill(importer, node, value=importer.argument(node, name))


@converts("ones.default", "ones_like.default", "new_ones.default", value=1.0)
@converts("zeros.default", "zeros_like.default", "new_zeros.default", value=0.0)
@converts("empty.memory_format", value=0.0)  # where torch leaves memory uninitialized
def fill(importer: Importer, node: fx.Node, *, value: Any) -> relax.Expr:
    """A constant for all elements."""
    dtype = dtype_name(node.meta["val"].dtype)
    if isinstance(value, fx.Node):
        raise UnsupportedOperator([str(node.target)], "its fill value is computed")
    if isinstance(value, Expr):
        return relax.op.broadcast_to(importer.number(value, dtype), list(importer.shape(node)))
    return relax.op.full(list(importer.shape(node)), importer.number(value, dtype), dtype)


@converts("repeat.default")
def repeat(importer: Importer, node: fx.Node) -> relax.Expr:
    """Repeat a tensor along each axis."""
    x, counts = importer.tensor(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    shape = importer.shape(node.args[0])
    shape = (*[1] * (len(counts) - len(shape)), *shape)
    separate = [size for axis in shape for size in (1, axis)]
    spread = [size for pair in zip(counts, shape, strict=True) for size in pair]
    x = importer.emit(relax.op.reshape(x, separate))
    x = importer.emit(relax.op.broadcast_to(x, spread))
    return relax.op.reshape(x, list(importer.shape(node)))


@converts("constant_pad_nd.default")
def pad(importer: Importer, node: fx.Node) -> relax.Expr:
    """Padding by a constant; a negative width crops."""
    widths: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    value = importer.argument(node, "value")
    if node.meta["val"].dtype is torch.bool:
        value = bool(value)
    out = importer.shape(node)
    kept = [0] * (len(out) - len(widths) // 2)
    before, after = kept + widths[-2::-2], kept + widths[::-2]

    may_begin_before = [bounds(width)[1] > 0 for width in before]

    def padded(x: te.Tensor, before: list[Any]) -> te.Tensor:
        def element(*indices: Any) -> Any:
            at = [i - b for i, b in zip(indices, before, strict=True)]
            inside = [a >= 0 for a, may in zip(at, may_begin_before, strict=True) if may]
            inside += [
                a < extent
                for a, width, extent in zip(at, after, x.shape, strict=True)
                if bounds(width)[1] > 0
            ]
            if not inside:
                return x(*at)
            return tirx.if_then_else(tirx.all(*inside), x(*at), tirx.const(value, x.dtype))

        return te.compute(out, element, name="pad")

    return importer.emit_te(padded, importer.tensor(node.args[0]), before)


@converts("copy.default", with_complex=True)
def copy(importer: Importer, node: fx.Node) -> relax.Expr:
    """The second argument, broadcast and cast to the first."""
    values = importer.tensor(node.args[1], node.meta["val"].dtype)
    return relax.op.broadcast_to(values, importer.held_shape(node))


@converts("diagonal.default")
def diagonal(importer: Importer, node: fx.Node) -> relax.Expr:
    rank = len(importer.shape(node.args[0]))
    names = ("offset", "dim1", "dim2")
    offset, first, second = (int(importer.argument(node, name)) for name in names)
    first, second = first % rank, second % rank

    def diagonal_of(x: te.Tensor) -> te.Tensor:
        def element(*indices: Any) -> Any:
            rest, along = iter(indices[:-1]), indices[-1]
            place = {first: along - min(offset, 0), second: along + max(offset, 0)}
            return x(*(place[a] if a in place else next(rest) for a in range(rank)))

        return te.compute(importer.shape(node), element, name="diagonal")

    return importer.emit_te(diagonal_of, importer.tensor(node.args[0]))


@converts("as_strided.default")
def as_strided(importer: Importer, node: fx.Node) -> relax.Expr:
    """Elements of a tensor, by their distances in the memory that it has in eager."""
    source, shape, strides = node.args[:3]
    given = source.meta["val"]  # type: ignore[union-attr]
    offset = importer.argument(node, "storage_offset")
    start = 0 if offset is None else offset - given.storage_offset()
    if not is_static(start, *shape, *strides, *given.shape, *given.stride()):  # type: ignore[misc]
        raise UnsupportedOperator([str(node.target)], "its sizes or strides vary")
    order = sorted(range(given.dim()), key=given.stride, reverse=True)
    last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))  # type: ignore[arg-type]
    if not given.permute(order).is_contiguous() or not 0 <= start <= last < given.numel():
        raise UnsupportedOperator(
            [str(node.target)], "its argument is not dense in memory, or it reads past its ends"
        )
    in_memory = importer.emit(relax.op.permute_dims(importer.tensor(source), order))
    flat = importer.emit(relax.op.reshape(in_memory, [given.numel()]))

    def read(x: te.Tensor) -> te.Tensor:
        def element(*indices: Any) -> Any:
            return x(sum((i * s for i, s in zip(indices, strides, strict=True)), start))  # type: ignore[arg-type]

        return te.compute(importer.shape(node), element, name="as_strided")

    return importer.emit_te(read, flat)


@converts("unfold.default")
def unfold(importer: Importer, node: fx.Node) -> relax.Expr:
    """Sliding windows along an axis; the position in the window becomes the last axis."""
    source, axis, _, step = node.args
    if not importer.shape(source):  # one window of one element
        return relax.op.reshape(importer.tensor(source), list(importer.shape(node)))
    axis = int(axis) % len(importer.shape(source))  # type: ignore[arg-type]

    def windows_of(x: te.Tensor) -> te.Tensor:
        def element(*indices: Any) -> Any:
            start = indices[axis] * step + indices[-1]
            return x(*indices[:axis], start, *indices[axis + 1 : -1])

        return te.compute(importer.shape(node), element, name="unfold")

    return importer.emit_te(windows_of, importer.tensor(source))


@converts("unfold_backward.default")
def add_windows(importer: Importer, node: fx.Node) -> relax.Expr:
    """Add windows along an axis where they overlap, as the end of an inverse short-time Fourier
    transform does. They are added row by row, with as many elements in a row as windows are apart,
    so that all elements of a row lie in the same windows.
    """
    source, _, axis, size, step = node.args
    shape, given = list(importer.shape(node)), list(importer.shape(source))  # type: ignore[arg-type]
    axis, length = int(axis) % len(shape), shape[int(axis)]  # type: ignore[arg-type]
    fits = len(given) == len(shape) + 1 and same(given[-1], size)
    if not fits or not same(given[axis], (length - size) // step + 1):  # type: ignore[operator]
        raise UnsupportedOperator(
            [str(node.target)], "its input does not have the shape that unfold gives"
        )
    before, (windows, *behind, _) = given[:axis], given[axis:]
    rows = ceil_div(length, step)

    def added(x: te.Tensor) -> te.Tensor:
        zero = tirx.const(0, dtype_of(importer.tensor(source)))

        def element(*indices: Any) -> Any:
            row, place = indices[axis : axis + 2]
            total = zero
            for back in reversed(range(ceil_div(size, step))):
                window, inside = row - back, place + back * step
                is_there = tirx.all(window >= 0, window < windows, inside < size)
                at = (*indices[:axis], window, *indices[axis + 2 :], inside)
                total = total + tirx.if_then_else(is_there, x(*at), zero)
            return total

        return te.compute([*before, rows, step, *behind], element, name="add_windows")

    def joined(x: te.Tensor) -> te.Tensor:
        def element(*indices: Any) -> Any:
            along = indices[axis]
            return x(*indices[:axis], along // step, along % step, *indices[axis + 1 :])

        return te.compute([*before, length, *behind], element, name="joined")

    sums = importer.emit_te(added, importer.tensor(source))
    if same(rows * step, length):
        sums = importer.emit(relax.op.reshape(sums, [*before, length, *behind]))
    else:
        sums = importer.emit_te(joined, sums)
    return relax.op.broadcast_to(sums, shape)


@converts("arange.start_step", "arange.default", "arange.start")
def arange(importer: Importer, node: fx.Node) -> relax.Expr:
    """A range of symbolic length; others are constants."""
    given = arguments(node)
    start, step = _whole(given.get("start", 0)), _whole(given.get("step", 1))
    if isinstance(start, float) or isinstance(step, float):
        raise UnsupportedOperator([str(node.target)], "it is a range of floats of symbolic length")
    dtype = dtype_name(node.meta["val"].dtype)

    def counted(start: Any, step: Any) -> te.Tensor:
        return te.compute(
            importer.shape(node), lambda i: (i * step + start).astype(dtype), name="arange"
        )

    return importer.emit_te(counted, start, step, primfunc_name_hint="arange")


def _whole(number: Any) -> Any:
    """Return a number as an int if it is a whole one."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
