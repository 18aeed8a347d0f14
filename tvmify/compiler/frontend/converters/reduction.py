"""Sums, means, extrema, variances, argmax and argmin, softmax, cumulative sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.aten.operators import arguments
from tvmify.compiler.backend import is_for_gpu
from tvmify.compiler.costs import NEST
from tvmify.compiler.frontend.converters.registry import converts, dtype_of, refuse_on_gpu
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.reduction import cumulative
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import bounds, hint, product, sizes_of
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

#: An operator of Relax that takes a tensor, axes, and whether these are kept.
Reduce = Callable[..., relax.Expr]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch sums in: at least 32 bits of a float, 64 of an integer."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point else torch.int64


def multiplier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to multiply matrices in: GPUs take half types, and accumulate in float32."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return dtype if is_half and is_for_gpu() else accumulator(dtype)


def _axes(importer: Importer, node: fx.Node) -> tuple[list[int], bool]:
    """Return the axes to reduce, and whether they are kept. It is all axes if none are given, and
    for overloads that lack the arguments.
    """
    rank, given = len(importer.shape(node.args[0])), arguments(node)
    axes, keep = given.get("dim"), bool(given.get("keepdim", False))
    if axes is None or axes == []:
        return list(range(rank)), keep
    axes = axes if isinstance(axes, (list, tuple)) else [axes]
    return [axis % max(rank, 1) for axis in axes], keep


@converts("sum.default", "sum.dim_IntList", reduce=relax.op.sum, identity=0)
@converts("prod.default", "prod.dim_int", reduce=relax.op.prod, identity=1)
@converts("mean.default", "mean.dim", reduce=relax.op.mean, identity=math.nan)
def total(importer: Importer, node: fx.Node, *, reduce: Reduce, identity: float) -> relax.Expr:
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    if not importer.shape(node.args[0]):
        return x
    if 0 in importer.shape(node.args[0]):
        # TVM makes a literal of an empty sum, and fails to divide by it.
        return relax.op.full(list(importer.shape(node)), relax.const(identity, dtype_of(x)))
    return _reduced(importer, reduce, x, *_axes(importer, node))


def _reduced(
    importer: Importer, reduce: Reduce, x: relax.Expr, axes: list[int], keep: bool
) -> relax.Expr:
    """Reduce axes; to reduce all, begin with the last one, so that threads divide the rows."""
    shape = sizes_of(x.ty.shape)
    if 1 < len(axes) == len(shape) and hint(product(shape)) >= NEST.worth_splitting:
        x = importer.emit(reduce(x, [len(shape) - 1], True))
    return reduce(x, axes, keep)


@converts("amax.default", "max.default", reduce=relax.op.max)
@converts("amin.default", "min.default", reduce=relax.op.min)
def extremum(importer: Importer, node: fx.Node, *, reduce: Reduce) -> relax.Expr:
    x = _comparable(importer, node.args[0])
    if not importer.shape(node.args[0]):
        return x
    return _reduced(importer, reduce, x, *_axes(importer, node))


@converts("any.default", "any.dim", "any.dims", reduce=relax.op.max, identity=False)
@converts("all.default", "all.dim", reduce=relax.op.min, identity=True)
def truth(importer: Importer, node: fx.Node, *, reduce: Reduce, identity: bool) -> relax.Expr:
    """The extremum of the values as bools."""
    x = relax.op.astype(importer.tensor(node.args[0], torch.bool), "int8")
    over_none = arguments(node).get("dim") == []  # of `any.dims`, which means none by it
    if over_none or not importer.shape(node.args[0]):
        return x
    if 0 in importer.shape(node.args[0]):
        return relax.op.full(list(importer.shape(node)), relax.const(identity, "bool"))
    return reduce(importer.emit(x), *_axes(importer, node))


@converts("var.dim")
def variance_of_sample(importer: Importer, node: fx.Node) -> relax.Expr:
    return _moments(importer, node, int(importer.argument(node, "unbiased")))[0]


@converts("var.correction")
def variance(importer: Importer, node: fx.Node) -> relax.Expr:
    return variance_and_mean(importer, node)[0]


@converts("var_mean.correction")
def variance_and_mean(importer: Importer, node: fx.Node) -> tuple[relax.Expr, relax.Expr]:
    correction = importer.argument(node, "correction")
    return _moments(importer, node, 1 if correction is None else correction)


def _moments(importer: Importer, node: fx.Node, correction: float) -> tuple[relax.Expr, relax.Expr]:
    """Return variance and mean. The mean first, then the squares of the deviations: one pass would
    cancel digits.

    Everything is relative to the first element, so that a large common offset costs no digits
    either; in float64, as in torch, with strict accuracy.
    """
    dtype = accumulator(node.args[0].meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(node.args[0], torch.float64 if choice.is_strict() else dtype)
    axes, keep = _axes(importer, node)
    shape = importer.shape(node.args[0])
    count = product(shape[axis] for axis in axes)
    if bounds(count)[0] - correction <= 0:
        raise UnsupportedOperator([str(node.target)], "it is the variance of too few elements")
    number = importer.number(count - correction, dtype_of(x))
    first, mean, deviation = deviations(importer, x, axes)
    squares = relax.op.sum(relax.op.multiply(deviation, deviation), axes, keep)
    result = relax.op.divide(squares, number)
    mean = importer.emit(relax.op.add(first, mean))
    if dtype_of(x) != dtype_name(dtype):
        result, mean = (
            importer.emit(relax.op.astype(importer.emit(value), dtype_name(dtype)))
            for value in (result, mean)
        )
    return importer.emit(result), mean if keep else importer.emit(relax.op.squeeze(mean, axes))


class Deviations(NamedTuple):
    """The deviations of elements from their mean along some axes.

    Attributes
    ----------
    first
        The first element along the axes, which are kept with extent 1.
    offset
        The mean minus the first element, with the same axes.
    centred
        The elements minus their mean.
    """

    first: relax.Var
    offset: relax.Var
    centred: relax.Var


def deviations(importer: Importer, x: relax.Expr, axes: list[int]) -> Deviations:
    """Return how the elements of a tensor deviate from their mean along axes."""
    shape = sizes_of(x.ty.shape)
    reduced = {axis % len(shape) for axis in axes}

    def first(x: te.Tensor) -> te.Tensor:
        kept = [1 if axis in reduced else extent for axis, extent in enumerate(shape)]

        def element(*i: Any) -> Any:
            return x(*i)

        return te.compute(kept, element, name="first")

    # In a separate kernel, so that reductions read x along their axes only.
    values = importer.emit_te(first, x)
    shifted = importer.emit(relax.op.subtract(x, values))
    offset = importer.emit(relax.op.mean(shifted, axes, True))
    return Deviations(values, offset, importer.emit(relax.op.subtract(shifted, offset)))


@converts("argmax.default", reduce=relax.op.max)
@converts("argmin.default", reduce=relax.op.min)
def position_of_extremum(importer: Importer, node: fx.Node, *, reduce: Reduce) -> relax.Expr:
    if node.args[0].meta["val"].dtype is torch.bool:  # type: ignore[union-attr]
        raise UnsupportedOperator([str(node.target)], "eager refuses bools")
    axis = importer.argument(node, "dim")
    keep = bool(importer.argument(node, "keepdim"))
    x, shape = _comparable(importer, node.args[0]), importer.shape(node.args[0])
    if axis is None:
        x = importer.emit(relax.op.reshape(x, [product(shape)]))
    found = _position(importer, x, axis or 0, reduce)[1]
    return relax.op.reshape(found, list(importer.shape(node))) if keep or axis is None else found


@converts("max.dim", reduce=relax.op.max)
@converts("min.dim", reduce=relax.op.min)
def extremum_and_position(
    importer: Importer, node: fx.Node, *, reduce: Reduce
) -> tuple[relax.Expr, relax.Expr]:
    x, axis = _comparable(importer, node.args[0]), int(node.args[1])  # type: ignore[arg-type]
    value, found = _position(importer, x, axis, reduce)
    shape = list(importer.sizes(node.meta["val"][0]))
    return (
        importer.emit(relax.op.reshape(value, shape)),
        importer.emit(relax.op.reshape(found, shape)),
    )


def _comparable(importer: Importer, source: Any) -> relax.Expr:
    """Return a tensor in a dtype that supports extrema."""
    dtype = source.meta["val"].dtype
    # TVM has neither isnan of bfloat16 nor extrema of bools.
    computed_in = {torch.bool: torch.int8, torch.bfloat16: torch.float32}
    return importer.tensor(source, computed_in.get(dtype, dtype))


def _position(
    importer: Importer, x: relax.Expr, axis: int, reduce: Reduce
) -> tuple[relax.Expr, relax.Expr]:
    """Return the extremum along an axis, which keeps extent 1, and its first index. Uses two
    reductions of numbers, which vectorize, rather than one of pairs. As in torch, NaN is more
    extreme than any number.
    """
    if not x.ty.shape.values:
        return x, relax.const(0, "int64")
    axis %= len(x.ty.shape.values)
    value = importer.emit(reduce(x, [axis], True))

    def candidates(every: te.Tensor, best: te.Tensor) -> te.Tensor:
        def element(*i: Any) -> Any:
            this = every(*i)
            equal = this == best(*i[:axis], 0, *i[axis + 1 :])
            if "float" in str(every.dtype):
                equal = tirx.any(equal, tirx.isnan(this))
            return tirx.Select(equal, tirx.Cast("int64", i[axis]), te.max_value("int64"))

        return te.compute(every.shape, element, name="candidates")

    places = importer.emit_te(candidates, x, value, primfunc_name_hint="candidates")
    return value, importer.emit(relax.op.min(places, [axis], False))


@converts("_softmax.default", "softmax.int", function=relax.op.nn.softmax)
@converts("_log_softmax.default", "log_softmax.int", function=relax.op.nn.log_softmax)
def softmax(
    importer: Importer, node: fx.Node, *, function: Callable[..., relax.Expr]
) -> relax.Expr:
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    if not importer.shape(node.args[0]):
        x = importer.emit(relax.op.reshape(x, [1]))
    result = importer.emit(function(x, int(node.args[1])))
    return result if importer.shape(node.args[0]) else relax.op.reshape(result, [])


@converts("cumsum.default", name=cumulative.SUM)
@converts("cumprod.default", name=cumulative.PRODUCT)
def running(importer: Importer, node: fx.Node, *, name: str) -> relax.Expr:
    dtype, shape = accumulator(node.meta["val"].dtype), importer.shape(node)
    x = importer.tensor(node.args[0], dtype)
    if not shape:
        return x
    axis = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    before, after = shape[:axis], shape[axis + 1 :]
    # One axis on either side, if any.
    flat = (*[product(before)][: len(before)], shape[axis], *[product(after)][: len(after)])
    refuse_on_gpu(name)
    function = cumulative.kernel(
        flat, len(before[:1]), dtype_of(x), name, Microarchitecture.current()
    )
    variable = importer.block_builder.add_func(function, name)
    if len(flat) < len(shape):
        x = importer.emit(relax.op.reshape(x, flat))
    result = importer.emit(relax.call_tir(variable, [x], relax.TensorType(flat, dtype_of(x))))
    return result if len(flat) == len(shape) else relax.op.reshape(result, list(shape))


@converts("linalg_vector_norm.default")
def norm(importer: Importer, node: fx.Node) -> relax.Expr:
    order = importer.argument(node, "ord")
    shape = importer.shape(node.args[0])
    axes = importer.argument(node, "dim")
    axes = list(range(len(shape))) if axes is None else list(axes)
    keep = bool(importer.argument(node, "keepdim"))
    x = importer.tensor(node.args[0], accumulator(node.meta["val"].dtype))
    if not shape or order not in (1, 2, math.inf, -math.inf):
        raise UnsupportedOperator([str(node.target)], f"it is a norm of order {order}")
    if order == 2:
        return relax.op.sqrt(relax.op.sum(relax.op.multiply(x, x), axes, keep))
    reduce = {1: relax.op.sum, math.inf: relax.op.max, -math.inf: relax.op.min}[order]
    return reduce(relax.op.abs(x), axes, keep)
