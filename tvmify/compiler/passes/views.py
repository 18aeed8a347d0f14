"""Finds the tensors that a value is a view of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.sizes import Size

_PERMUTE, _SLICE, _SPLIT = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("permute_dims", "strided_slice", "split")
)
#: Operators that move no elements.
RESHAPES = tuple(tvm.ir.Op.get(f"relax.{name}") for name in ("reshape", "squeeze", "expand_dims"))


#: Replaces a size by a number.
Number = Callable[[Size], int]


def views(
    x: Expr, value: Callable[[Expr], Expr | None], number: Number
) -> Iterator[tuple[Expr, torch.Tensor]]:
    """Yield the tensors that `x` is a view of, the base first and `x` itself last.

    Parameters
    ----------
    value
        Returns the value of a variable.
    number
        See `tvmify.compiler.sizes.trials`: the result for one assignment need not hold for others.

    Yields
    ------
    tuple
        A contiguous tensor, and `x` as a view of it: a PyTorch tensor without memory, whose strides
        and offset give the position of `x`.
    """
    path = [x]
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    while (before := _before(path[-1], value, number)) is not None:
        path.append(before[0])
        steps.append(before[1])
    for count in reversed(range(len(path))):
        view = torch.empty([*map(number, shape_of(path[count]))], device="meta")
        try:
            for step in reversed(steps[:count]):
                view = step(view)
        except RuntimeError:  # a reshape would have to copy
            continue
        yield path[count], view


def common_axes(
    shape: Sequence[Size], source: Sequence[Size]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield groups of axes of `shape` and `source` that hold the same elements. Groups are as small
    as is known to be possible; axes of one element are in no group. Neither shape has an extent of
    zero.
    """
    own = [axis for axis, size in enumerate(shape) if not sizes.is_one(size)]
    others = [axis for axis, size in enumerate(source) if not sizes.is_one(size)]
    while own:
        mine, theirs = [own.pop(0)], [others.pop(0)]
        while not sizes.same(
            size := sizes.product(shape[a] for a in mine),
            other := sizes.product(source[a] for a in theirs),
        ):
            if not (own or others):
                break  # a guard may say that ``s // 2 * 2`` and ``s`` are equal
            # Two symbolic sizes with equal hints may differ: then both are too few.
            count, wanted = sizes.hint(size), sizes.hint(other)
            more, more_of_theirs = count <= wanted or not others, count >= wanted or not own
            if more and own:
                mine.append(own.pop(0))
            if more_of_theirs and others:
                theirs.append(others.pop(0))
        yield mine, theirs


def _before(
    x: Expr, value: Callable[[Expr], Expr | None], number: Number
) -> tuple[Expr, Callable[[torch.Tensor], torch.Tensor]] | None:
    """Return the source of `x` and how it is viewed; None if `x` is not a view."""
    call = value(x)
    if isinstance(call, relax.TupleGetItem):
        split = value(call.tuple_value)
        if not isinstance(split, relax.Call) or split.op != _SPLIT:
            return None
        axis = int(split.attrs.axis)
        extents = [[*map(number, shape_of(part))] for part in split.ty.fields]
        first = sum(extent[axis] for extent in extents[: call.index])
        return split.args[0], lambda t: t.narrow(axis, first, extents[call.index][axis])
    if not isinstance(call, relax.Call):
        return None
    if call.op in RESHAPES:
        return call.args[0], lambda t: t.view([*map(number, shape_of(x))])
    if (order := permutation(call)) is not None:
        return call.args[0], lambda t: t.permute(order)
    if call.op == _SLICE:
        axes, begins, _, *strides = ([*map(number, part.fields)] for part in call.args[1:])
        by = strides[0] if strides else [1] * len(axes)
        extents = [number(shape_of(x)[axis]) for axis in axes]
        slices = list(zip(axes, begins, extents, by, strict=True))
        if min(begins) >= 0 and min(by) > 0:
            return call.args[0], lambda t: _sliced(t, slices)
    return None


def _sliced(t: torch.Tensor, slices: list[tuple[int, int, int, int]]) -> torch.Tensor:
    """Take slices, each given by an axis, a first element, a number of elements, and a step."""
    for axis, begin, extent, by in slices:
        t = t.narrow(axis, begin, (extent - 1) * by + 1)
        t = t[(slice(None),) * (axis % t.dim()) + (slice(None, None, by),)]
    return t


def permutation(value: Expr | None) -> list[int] | None:
    """Return the axes, counted from the first, of a call that permutes them; else None."""
    if not isinstance(value, relax.Call) or value.op != _PERMUTE:
        return None
    rank, axes = len(value.args[0].ty.shape), value.attrs.axes
    return [*range(rank)][::-1] if axes is None else [int(axis) % rank for axis in axes]


def is_transpose(value: Expr | None) -> bool:
    """Whether a value is a call that swaps the last two axes."""
    axes = permutation(value)
    return axes is not None and axes == [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]


def shape_of(x: Expr | relax.TensorType) -> tuple[Any, ...]:
    """Shape of a tensor or of its type."""
    ty = x if isinstance(x, relax.TensorType) else x.ty
    return tuple(sizes.sizes_of(ty.shape.values))


def static_shape(x: Expr | relax.TensorType) -> list[int]:
    """Shape of a tensor or of its type, none of whose sizes is symbolic."""
    return [int(size) for size in shape_of(x)]
