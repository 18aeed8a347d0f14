"""Sums, means, extrema, variances, arg-extrema, softmax, running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.converters.registry import converts, dtype_of
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.importer import Importer


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch sums in: at least 32 bits of a float, 64 of an integer."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point else torch.int64


def _axes(importer: Importer, node: fx.Node) -> list[int]:
    """Return the axes to reduce, as given; all of them if none are."""
    rank = len(importer.shape(node.args[0]))
    axes = importer.argument(node, 1, "dim")
    if axes is None or axes == []:
        return list(range(rank))
    return [axis % max(rank, 1) for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]


@converts("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "prod.default", "prod.dim_int")
def total(importer: Importer, node: fx.Node) -> relax.Expr:
    name, overload = str(node.target).split(".")[1:]
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    if not importer.shape(node.args[0]):
        return x
    whole = overload == "default"
    axes = None if whole else _axes(importer, node)
    keep = False if whole else bool(importer.argument(node, 2, "keepdim", False))
    return getattr(relax.op, name)(x, axes, keep)


@converts("amax.default", "amin.default", "max.default", "min.default")
def extremum(importer: Importer, node: fx.Node) -> relax.Expr:
    name = "max" if "max" in str(node.target) else "min"
    keep = bool(importer.argument(node, 2, "keepdim", False))
    return _extremum(importer, node.args[0], name, _axes(importer, node), keep)


def _extremum(importer: Importer, source: Any, name: str, axes: list[int], keep: bool) -> relax.Expr:
    dtype = source.meta["val"].dtype
    x = importer.tensor(source, torch.int8 if dtype is torch.bool else dtype)
    if not importer.shape(source):
        return x
    return (relax.op.max if name == "max" else relax.op.min)(x, axes, keep)


@converts("any.default", "any.dim", "any.dims", "all.default", "all.dim")
def truth(importer: Importer, node: fx.Node) -> relax.Expr:
    """The extremum of the truths."""
    x = relax.op.astype(importer.tensor(node.args[0], torch.bool), "int8")
    if not importer.shape(node.args[0]):
        return x
    keep = bool(importer.argument(node, 2, "keepdim", False))
    reduce = relax.op.max if ".any." in str(node.target) else relax.op.min
    return reduce(importer.emit(x), _axes(importer, node), keep)


@converts("var.correction", "var.dim")
def variance(importer: Importer, node: fx.Node) -> relax.Expr:
    """The mean first, then the squares of the deviations: one pass would cancel digits."""
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    axes = _axes(importer, node)
    correction = node.kwargs.get("correction", 1)
    if str(node.target).endswith(".dim"):
        correction = int(importer.argument(node, 2, "unbiased", True))
    correction = 1 if correction is None else correction
    keep = bool(importer.argument(node, 3, "keepdim", False))
    shape = importer.shape(node.args[0])
    count = 1
    for axis in axes:
        count *= shape[axis]
    if count - correction <= 0:
        raise UnsupportedOperator([str(node.target)], "the variance of too few elements")
    deviation = importer.emit(relax.op.subtract(x, relax.op.mean(x, axes, True)))
    squares = relax.op.sum(relax.op.multiply(deviation, deviation), axes, keep)
    return relax.op.divide(squares, relax.const(float(count - correction), dtype_of(x)))


@converts("argmax.default", "argmin.default")
def argument_of_extremum(importer: Importer, node: fx.Node) -> relax.Expr:
    x = importer.tensor(node.args[0])
    axis = importer.argument(node, 1, "dim")
    keep = bool(importer.argument(node, 2, "keepdim", False))
    reduce = _arg_reducer("argmax" in str(node.target))
    return importer.emit_te(lambda t: _reduce_index(t, axis, keep, reduce), x)


@converts("max.dim", "min.dim")
def extremum_and_index(importer: Importer, node: fx.Node) -> tuple[relax.Expr, relax.Expr]:
    name = "max" if "max" in str(node.target) else "min"
    keep = bool(importer.argument(node, 2, "keepdim", False))
    axis = node.args[1]
    values = importer.emit(_extremum(importer, node.args[0], name, _axes(importer, node), keep))
    reduce = _arg_reducer(name == "max")
    x = importer.tensor(node.args[0])
    return values, importer.emit_te(lambda t: _reduce_index(t, axis, keep, reduce), x)


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
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    if not importer.shape(node.args[0]):
        return x
    function = relax.op.cumsum if "cumsum" in str(node.target) else relax.op.cumprod
    return function(x, int(node.args[1]))


# ------------------------------------------------------------------------ tensor expressions


def _arg_reducer(largest: bool) -> Callable[..., Any]:
    """Make a reducer of (index, value) pairs: the first extremum, or the first NaN, wins."""

    def combine(left: Any, right: Any) -> tuple[Any, Any]:
        better = left[1] > right[1] if largest else left[1] < right[1]
        first = tirx.all(left[1] == right[1], left[0] < right[0])
        keep = tirx.any(better, first)
        if "float" in str(left[1].ty.dtype):
            left_nan, right_nan = tirx.isnan(left[1]), tirx.isnan(right[1])
            both = tirx.all(left_nan, right_nan, left[0] < right[0])
            keep = tirx.any(both, tirx.all(tirx.Not(right_nan), tirx.any(left_nan, keep)))
        return tirx.Select(keep, left[0], right[0]), tirx.Select(keep, left[1], right[1])

    def identity(index: str, value: str) -> tuple[Any, Any]:
        # Larger than any index, so that an element equal to the identity still wins.
        worst = te.min_value(value) if largest else te.max_value(value)
        return te.max_value(index), worst

    return te.comm_reducer(combine, identity, name="argmax" if largest else "argmin")


def _reduce_index(x: te.Tensor, axis: int | None, keep: bool, reduce: Any) -> te.Tensor:
    extents = [int(e) for e in x.shape]
    axes = list(range(len(extents))) if axis is None else [axis % max(len(extents), 1)]
    if not extents:
        return te.compute((), lambda: tirx.const(0, "int64"))
    shape = [1 if i in axes else e for i, e in enumerate(extents)]
    if not keep:
        shape = [e for i, e in enumerate(extents) if i not in axes]
    reduced = {i: te.reduce_axis((0, extents[i]), f"k{i}") for i in axes}

    def element(*indices: Any) -> Any:
        rest = iter(indices if not keep else [v for i, v in enumerate(indices) if i not in axes])
        at = [reduced[i] if i in axes else next(rest) for i in range(len(extents))]
        flat: Any = tirx.const(0, "int64")
        for i in axes:
            flat = flat * extents[i] + reduced[i].var.astype("int64")
        return reduce((flat, x(*at)), axis=list(reduced.values()))

    return te.compute(shape, element, name="arg_reduce")[0]
