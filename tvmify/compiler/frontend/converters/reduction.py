"""Sums, means, extrema, variances, argmax and argmin, softmax, cumulative sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from tvm import relax, te, tirx

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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch sums in: at least 32 bits of a float, 64 of an integer."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point else torch.int64


def multiplier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to multiply matrices in: GPUs take half types, and accumulate in float32."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return dtype if is_half and is_for_gpu() else accumulator(dtype)


def _axes(importer: Importer, node: fx.Node) -> list[int]:
    """Return the given axes to reduce, or all of them if none are given."""
    rank = len(importer.shape(node.args[0]))
    axes = importer.argument(node, 1, "dim")
    if axes is None or axes == []:
        return list(range(rank))
    return [axis % max(rank, 1) for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]


@converts("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")
@converts("prod.default", "prod.dim_int")
def total(importer: Importer, node: fx.Node) -> relax.Expr:
    name, overload = str(node.target).split(".")[1:]
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    if not importer.shape(node.args[0]):
        return x
    whole = overload == "default"
    axes = None if whole else _axes(importer, node)
    keep = False if whole else bool(importer.argument(node, 2, "keepdim", False))
    if 0 in importer.shape(node.args[0]):
        # TVM makes a literal of an empty sum, and fails to divide by it.
        identity = {"sum": 0, "prod": 1, "mean": math.nan}[name]
        return relax.op.full(list(importer.shape(node)), relax.const(identity, dtype_of(x)))
    return _reduced(importer, getattr(relax.op, name), x, axes, keep)


def _reduced(
    importer: Importer,
    reduce: Callable[..., relax.Expr],
    x: relax.Expr,
    axes: list[int] | None,
    keep: bool,
) -> relax.Expr:
    """Reduce axes; to reduce all, begin with the last one, so that threads divide the rows."""
    shape = sizes_of(x.ty.shape)
    every = axes is None or len(axes) == len(shape)
    if every and len(shape) > 1 and hint(product(shape)) >= NEST.worth_splitting:
        x = importer.emit(reduce(x, [len(shape) - 1], True))
    return reduce(x, axes, keep)


@converts("amax.default", "amin.default", "max.default", "min.default")
def extremum(importer: Importer, node: fx.Node) -> relax.Expr:
    name = "max" if "max" in str(node.target) else "min"
    keep = bool(importer.argument(node, 2, "keepdim", False))
    return _extremum(importer, node.args[0], name, _axes(importer, node), keep)


def _extremum(
    importer: Importer, source: Any, name: str, axes: list[int], keep: bool
) -> relax.Expr:
    x = _comparable(importer, source)
    if not importer.shape(source):
        return x
    reduce = relax.op.max if name == "max" else relax.op.min
    return _reduced(importer, reduce, x, axes, keep)


@converts("any.default", "any.dim", "any.dims", "all.default", "all.dim")
def truth(importer: Importer, node: fx.Node) -> relax.Expr:
    """The extremum of the values as bools."""
    x = relax.op.astype(importer.tensor(node.args[0], torch.bool), "int8")
    over_none = str(node.target).endswith(".dims") and importer.argument(node, 1, "dim") == []
    if over_none or not importer.shape(node.args[0]):
        return x
    is_any = ".any." in str(node.target)
    if 0 in importer.shape(node.args[0]):
        return relax.op.full(list(importer.shape(node)), relax.const(not is_any, "bool"))
    keep = bool(importer.argument(node, 2, "keepdim", False))
    reduce = relax.op.max if is_any else relax.op.min
    return reduce(importer.emit(x), _axes(importer, node), keep)


@converts("var.correction", "var.dim", "var_mean.correction")
def variance(importer: Importer, node: fx.Node) -> Any:
    """The mean first, then the squares of the deviations: one pass would cancel digits.

    Everything is relative to the first element, so that a large common offset costs no digits
    either; in float64, as in torch, with strict accuracy.
    """
    with_mean = "var_mean" in str(node.target)
    dtype = accumulator(node.args[0].meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(node.args[0], torch.float64 if choice.is_strict() else dtype)
    axes = _axes(importer, node)
    correction = node.kwargs.get("correction", 1)
    if str(node.target).endswith(".dim"):
        correction = int(importer.argument(node, 2, "unbiased", True))
    correction = 1 if correction is None else correction
    keep = bool(importer.argument(node, 3, "keepdim", False))
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
    if not with_mean:
        return result
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


@converts("argmax.default", "argmin.default")
def position_of_extremum(importer: Importer, node: fx.Node) -> relax.Expr:
    if node.args[0].meta["val"].dtype is torch.bool:  # type: ignore[union-attr]
        raise UnsupportedOperator([str(node.target)], "eager refuses bools")
    axis = importer.argument(node, 1, "dim")
    keep = bool(importer.argument(node, 2, "keepdim", False))
    x, shape = _comparable(importer, node.args[0]), importer.shape(node.args[0])
    if axis is None:
        x = importer.emit(relax.op.reshape(x, [product(shape)]))
    found = _position(importer, x, axis or 0, "argmax" in str(node.target))[1]
    return relax.op.reshape(found, list(importer.shape(node))) if keep or axis is None else found


@converts("max.dim", "min.dim")
def extremum_and_position(importer: Importer, node: fx.Node) -> tuple[relax.Expr, relax.Expr]:
    x, axis = _comparable(importer, node.args[0]), int(node.args[1])  # type: ignore[arg-type]
    value, found = _position(importer, x, axis, "max" in str(node.target))
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
    importer: Importer, x: relax.Expr, axis: int, largest: bool
) -> tuple[relax.Expr, relax.Expr]:
    """Return the extremum along an axis, which keeps extent 1, and its first index. Uses two
    reductions of numbers, which vectorize, rather than one of pairs. As in torch, NaN is more
    extreme than any number.
    """
    if not x.ty.shape.values:
        return x, relax.const(0, "int64")
    axis %= len(x.ty.shape.values)
    value = importer.emit((relax.op.max if largest else relax.op.min)(x, [axis], True))

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


@converts("_softmax.default", "_log_softmax.default", "softmax.int", "log_softmax.int")
def softmax(importer: Importer, node: fx.Node) -> relax.Expr:
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    if not importer.shape(node.args[0]):
        x = importer.emit(relax.op.reshape(x, [1]))
    function = relax.op.nn.log_softmax if "log" in str(node.target) else relax.op.nn.softmax
    result = importer.emit(function(x, int(node.args[1])))
    return result if importer.shape(node.args[0]) else relax.op.reshape(result, [])


@converts("cumsum.default", "cumprod.default")
def running(importer: Importer, node: fx.Node) -> relax.Expr:
    dtype, shape = accumulator(node.meta["val"].dtype), importer.shape(node)
    x = importer.tensor(node.args[0], dtype)
    if not shape:
        return x
    axis = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    before, after = shape[:axis], shape[axis + 1 :]
    # One axis on either side, if any.
    flat = (*[product(before)][: len(before)], shape[axis], *[product(after)][: len(after)])
    name = cumulative.PRODUCT if "cumprod" in str(node.target) else cumulative.SUM
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
    order = importer.argument(node, 1, "ord", 2)
    shape = importer.shape(node.args[0])
    axes = importer.argument(node, 2, "dim")
    axes = list(range(len(shape))) if axes is None else list(axes)
    keep = bool(importer.argument(node, 3, "keepdim", False))
    x = importer.tensor(node.args[0], accumulator(node.meta["val"].dtype))
    if not shape or order not in (1, 2, math.inf, -math.inf):
        raise UnsupportedOperator([str(node.target)], f"it is a norm of order {order}")
    if order == 2:
        return relax.op.sqrt(relax.op.sum(relax.op.multiply(x, x), axes, keep))
    reduce = {1: relax.op.sum, math.inf: relax.op.max, -math.inf: relax.op.min}[order]
    return reduce(relax.op.abs(x), axes, keep)
