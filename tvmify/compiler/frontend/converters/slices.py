"""Reading and writing slices of an axis, and splitting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.frontend.converters import loops
from tvmify.compiler.frontend.converters.registry import call_loop, converts, dtype_of
from tvmify.compiler.frontend.writes import region_of
from tvmify.compiler.sizes import bounds, is_static, number_or_expression, same
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


@converts("select.int", with_complex=True)
def select(importer: Importer, node: fx.Node) -> relax.Expr:
    x, shape = importer.tensor(node.args[0]), importer.shape(node.args[0])
    axis = int(importer.argument(node, "dim")) % len(shape)
    first = importer.argument(node, "index")
    if not is_static(shape[axis], first):
        return _symbolic_select(importer, node, axis, first)
    first = int(first) % shape[axis]
    part = importer.emit(relax.op.strided_slice(x, [axis], [first], [first + 1]))
    return relax.op.squeeze(part, [axis])


@converts("slice.Tensor", with_complex=True)
def take_slice(importer: Importer, node: fx.Node) -> relax.Expr:
    x, shape = importer.tensor(node.args[0]), importer.shape(node.args[0])
    axis = int(importer.argument(node, "dim")) % len(shape)
    start, end, step = (importer.argument(node, name) for name in ("start", "end", "step"))
    if not is_static(shape[axis], *(bound for bound in (start, end) if bound is not None)):
        return _symbolic_slice(importer, x, axis, start, step, importer.held_shape(node))
    start, end, step = slice(start, end, step).indices(shape[axis])
    if (start, end, step) == (0, shape[axis], 1):
        return x
    return relax.op.strided_slice(x, [axis], [start], [max(end, start)], [step])


@converts("split_with_sizes.default", "split.Tensor", "chunk.default", with_complex=True)
@converts("unbind.int", with_complex=True, unbinds=True)
def split(importer: Importer, node: fx.Node, *, unbinds: bool = False) -> tuple[relax.Expr, ...]:
    x, shape = importer.tensor(node.args[0]), importer.shape(node.args[0])
    axis = int(importer.argument(node, "dim")) % len(shape)
    parts, start = [], 0
    for value in node.meta["val"]:
        size = 1 if unbinds else importer.sizes(value)[axis]
        if is_static(shape[axis], start, size):
            part = importer.emit(relax.op.strided_slice(x, [axis], [start], [start + size]))
        else:
            part = _symbolic_slice(importer, x, axis, start, 1, importer.held_sizes(value))
        parts.append(importer.emit(relax.op.squeeze(part, [axis])) if unbinds else part)
        start += size
    return tuple(parts)


@converts("select_scatter.default", with_complex=True, is_index=True)
@converts("slice_scatter.default", with_complex=True, is_index=False)
def scatter_slice(importer: Importer, node: fx.Node, *, is_index: bool) -> relax.Expr:
    if node in importer.in_place:
        return _write_region(importer, node)
    source, values = node.args[:2]
    shape, dtype = importer.shape(source), node.meta["val"].dtype
    axis = int(importer.argument(node, "dim")) % len(shape)
    x, part = importer.tensor(source), importer.tensor(values, dtype)
    start = importer.argument(node, "index" if is_index else "start")
    step = 1 if is_index else importer.argument(node, "step")
    if is_index:
        part = importer.emit(relax.op.expand_dims(part, axis))
    start = _place(shape[axis], start, is_index=is_index)

    def slice_written(old: te.Tensor, new: te.Tensor, start: Any) -> te.Tensor:
        def element(*i: Any) -> Any:
            offset = i[axis] - start
            place = tirx.floordiv(offset, step)
            inside = tirx.all(
                offset >= 0, place < new.shape[axis], tirx.floormod(offset, step) == 0
            )
            return tirx.if_then_else(inside, new(*i[:axis], place, *i[axis + 1 :]), old(*i))

        return te.compute(old.shape, element, name="scatter_slice")

    return importer.emit_te(slice_written, x, part, start)


def _write_region(importer: Importer, node: fx.Node) -> relax.Expr:
    """Write in the caller's memory."""
    region = region_of(node)
    assert region is not None
    x, part = importer.tensor(node.args[0]), importer.tensor(region.value, node.meta["val"].dtype)
    shape = [*map(number_or_expression, x.ty.shape.values)]
    starts: list[Any] = [0] * len(shape)
    for step in region.steps:
        size = importer.symbols.size(step.size)
        starts[step.axis] += _place(size, step.start, is_index=step.is_index)
    for axis in sorted(step.axis for step in region.steps if step.is_index):
        part = importer.emit(relax.op.expand_dims(part, axis))
    written = [*map(number_or_expression, part.ty.shape.values)]

    if is_static(*starts):
        at: relax.Expr = relax.const(np.array(starts), "int64")
    else:

        def starts_of(*starts: Any) -> te.Tensor:
            def element(i: Any) -> Any:
                chosen = starts[-1]
                for axis, start in enumerate(starts[:-1]):
                    chosen = tirx.if_then_else(i == axis, start, chosen)
                return tirx.Cast("int64", chosen)

            return te.compute((len(starts),), element, name="starts")

        at = importer.emit_te(starts_of, *starts)
    function = loops.write_region(shape, written, dtype_of(x))
    return call_loop(importer, function, "write_region", [x, at, part], shape, in_place=True)


def _place(size: Any, start: Any, *, is_index: bool) -> Any:
    """Return the number of the first element of an axis that a slice or an index takes.

    Raises
    ------
    UnsupportedOperator
        It depends on which of two sizes is larger.
    """
    start = 0 if start is None else start
    if not is_static(size, start):
        return _first_of_slice(size, start)
    return int(start) % size if is_index else slice(start, None).indices(size)[0]


def _symbolic_slice(
    importer: Importer, x: relax.Expr, axis: int, start: Any, step: Any, out: list[Any]
) -> relax.Expr:
    """Return a slice with a symbolic size, or of a tensor with one."""
    step = 1 if step is None else step
    size = number_or_expression(x.ty.shape.values[axis])
    if step == 1 and same(size, out[axis]):  # the whole axis
        return x
    first = _first_of_slice(size, 0 if start is None else start)

    def sliced(x: te.Tensor, first: Any) -> te.Tensor:
        def element(*i: Any) -> Any:
            return x(*i[:axis], i[axis] * step + first, *i[axis + 1 :])

        return te.compute(out, element, name="slice")

    return importer.emit_te(sliced, x, first)


def _first_of_slice(size: Any, start: Any) -> Any:
    """Return where a slice of an axis begins, of which one of the two is an expression.

    Raises
    ------
    UnsupportedOperator
        It depends on which of the two is larger.
    """
    is_from_end = is_static(start) and start < 0
    if bounds(size)[0] < -start if is_from_end else bounds(start)[0] < 0:
        raise UnsupportedOperator(["aten.slice.Tensor"], f"the slice starts at {start}")
    return size + start if is_from_end else start


def _symbolic_select(importer: Importer, node: fx.Node, axis: int, index: Any) -> relax.Expr:
    size = importer.shape(node.args[0])[axis]
    if not is_static(index) or bounds(size)[0] < (index + 1 if index >= 0 else -index):
        raise UnsupportedOperator(
            [str(node.target)], f"its index {index} may be out of range for the size {size}"
        )

    def selected(x: te.Tensor) -> te.Tensor:
        place = index if index >= 0 else x.shape[axis] + index

        def element(*i: Any) -> Any:
            return x(*i[:axis], place, *i[axis:])

        return te.compute([*x.shape[:axis], *x.shape[axis + 1 :]], element, name="select")

    return importer.emit_te(selected, importer.tensor(node.args[0]))
