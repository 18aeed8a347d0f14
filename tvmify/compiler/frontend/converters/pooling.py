"""Pooling over windows, and resampling of images."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.aten.operators import base_name
from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.frontend import places
from tvmify.compiler.frontend.converters import resizing
from tvmify.compiler.frontend.converters.indexing import reading
from tvmify.compiler.frontend.converters.reduction import accumulator
from tvmify.compiler.frontend.converters.registry import converts, dtype_of, per_axis
from tvmify.compiler.sizes import hint, is_one, is_static, sizes_of
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

aten = torch.ops.aten


@converts("max_pool2d_with_indices.default", rank=2)
@converts("max_pool3d_with_indices.default", rank=3)
def max_pool(importer: Importer, node: fx.Node, *, rank: int) -> tuple[relax.Expr, None]:
    """The maximum of each window; its index is not supported."""
    if any(user.args[1] != 0 for user in node.users):
        raise UnsupportedOperator([str(node.target)], "the indices of the maxima are used")
    x, shape = importer.tensor(node.args[0]), importer.shape(node.args[0])
    if len(shape) == rank + 1:
        x = importer.emit(relax.op.expand_dims(x, 0))
    size = per_axis(node.args[1], rank)
    stride = per_axis(importer.argument(node, "stride") or size, rank)
    before = per_axis(importer.argument(node, "padding"), rank)
    dilation = per_axis(importer.argument(node, "dilation"), rank)
    # Padding up to the end of the last window equals torch's ceil_mode, whose last window only has
    # to begin inside the image.
    extents = list(importer.sizes(node.meta["val"][0])[-rank:])
    if importer.argument(node, "ceil_mode") and not is_static(*extents):
        raise UnsupportedOperator(
            [str(node.target)], "ceil_mode is not supported for images of symbolic size"
        )
    after = [
        max((out - 1) * s + d * (k - 1) + 1 - e - b, 0) if is_static(out, e) else b
        for out, s, d, k, e, b in zip(
            extents, stride, dilation, size, shape[-rank:], before, strict=True
        )
    ]
    pool = relax.op.nn.max_pool2d if rank == 2 else relax.op.nn.max_pool3d

    def pooled(images: relax.Expr) -> relax.Expr:
        return pool(images, size, stride, [*before, *after], dilation)

    result = importer.emit(_with_known_channels(importer, x, pooled))
    if len(shape) == rank + 1:
        result = importer.emit(relax.op.squeeze(result, [0]))
    return result, None


@converts("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(importer: Importer, node: fx.Node) -> tuple[relax.Expr, None]:
    """The maximum of each window, along one axis after the other, but not its index."""
    shape, out = importer.shape(node.args[0]), importer.sizes(node.meta["val"][0])
    axes = list(range(len(shape) - len(node.args[1]), len(shape)))  # type: ignore[arg-type]
    if not node.meta["val"][0].dtype.is_floating_point:
        raise UnsupportedOperator([str(node.target)], "eager raises an error for integers")
    x = importer.tensor(node.args[0], accumulator(node.meta["val"][0].dtype))
    if all(is_one(out[axis]) for axis in axes):
        return importer.emit(relax.op.max(x, axes, True)), None
    if not is_static(*(sizes[axis] for sizes in (shape, out) for axis in axes)):
        raise UnsupportedOperator([str(node.target)], "a size that it pools is symbolic")
    for axis in axes:
        windows = importer.emit_te(_windows, x, axis, out[axis])
        x = importer.emit(relax.op.max(windows, [axis + 1]))
    return x, None


def _windows(x: te.Tensor, axis: int, count: int) -> te.Tensor:
    """Divide an axis into windows ``[count, length]``, as adaptive pooling does; they may overlap,
    and a shorter one repeats its last element.
    """
    shape = sizes_of(x.shape)
    extent = int(shape[axis])

    def ends(window: Any) -> tuple[Any, Any]:
        return window * extent // count, ((window + 1) * extent - 1) // count

    length = max(last - first + 1 for first, last in map(ends, range(count)))

    def element(*indices: Any) -> Any:
        first, last = ends(indices[axis])
        at = tirx.min(first + indices[axis + 1], last)
        return x(*indices[:axis], at, *indices[axis + 2 :])

    return te.compute([*shape[:axis], count, length, *shape[axis + 1 :]], element, name="windows")


@converts("avg_pool2d.default", rank=2)
@converts("avg_pool3d.default", rank=3)
def average_pool(importer: Importer, node: fx.Node, *, rank: int) -> relax.Expr:
    shape = importer.shape(node.args[0])
    size = per_axis(node.args[1], rank)
    stride = per_axis(importer.argument(node, "stride") or size, rank)
    padding = per_axis(importer.argument(node, "padding"), rank)
    with_padding = bool(importer.argument(node, "count_include_pad"))
    divisor = importer.argument(node, "divisor_override")
    dtype = accumulator(node.meta["val"].dtype)
    x = importer.tensor(node.args[0], dtype)
    out = list(importer.shape(node))
    if len(shape) == 4 and rank == 2 and not divisor and not importer.argument(node, "ceil_mode"):
        # This form adopts the layout of its neighbours, and is scheduled.
        def averaged(images: relax.Expr) -> relax.Expr:
            pool = relax.op.nn.avg_pool2d
            return pool(images, size, stride, padding * 2, count_include_pad=with_padding)

        return _with_known_channels(importer, x, averaged)

    def average_pool_of(image: te.Tensor) -> te.Tensor:
        offsets = [te.reduce_axis((0, k), f"k{i}") for i, k in enumerate(size)]

        def total(*indices: Any) -> Any:
            at = [
                i * s - p + k
                for i, s, p, k in zip(indices[-rank:], stride, padding, offsets, strict=True)
            ]
            inside = tirx.all(
                *(tirx.all(a >= 0, a < e) for a, e in zip(at, shape[-rank:], strict=True))
            )
            element = image(*indices[:-rank], *at)
            zero = tirx.const(0.0, image.dtype)
            return te.sum(tirx.if_then_else(inside, element, zero), axis=offsets)

        sums = te.compute(out, total, name="window_sum")

        def mean(*indices: Any) -> Any:
            count: Any = tirx.const(1, "int32")
            for i, s, p, k, e in zip(
                indices[-rank:], stride, padding, size, shape[-rank:], strict=True
            ):
                first, last = i * s - p, tirx.min(i * s - p + k, e + p)
                if not with_padding:
                    first, last = tirx.max(first, 0), tirx.min(last, e)
                count = count * (last - first)
            share = tirx.const(divisor, image.dtype) if divisor else count.astype(image.dtype)
            # PyTorch truncates quotients of integers.
            divide = operator.truediv if dtype.is_floating_point else tirx.truncdiv
            return divide(sums(*indices), share)

        return te.compute(out, mean, name="window_mean")

    return importer.emit_te(average_pool_of, x)


def _with_known_channels(
    importer: Importer, x: relax.Expr, pool: Callable[[relax.Expr], relax.Expr]
) -> relax.Expr:
    """Pool images; those with a symbolic number of channels as many images of one channel."""
    batch, channels, *extents = sizes_of(x.ty.shape)
    if is_static(channels):
        return pool(x)
    images = importer.emit(relax.op.reshape(x, [batch * channels, 1, *extents]))
    result = importer.emit(pool(images))
    return relax.op.reshape(result, [batch, channels, *sizes_of(result.ty.shape)[2:]])


@converts(
    "_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", "adaptive_avg_pool1d.default"
)
def adaptive_average_pool(importer: Importer, node: fx.Node) -> relax.Expr:
    """Each axis is averaged by a matrix, computed by torch itself."""
    shape, out = importer.shape(node.args[0]), importer.shape(node)
    sizes = list(node.args[1])  # type: ignore[arg-type]
    axes = range(len(shape) - len(sizes), len(shape))
    if not is_static(*(extents[axis] for extents in (shape, out) for axis in axes)):
        raise UnsupportedOperator([str(node.target)], "a size that it averages over is symbolic")

    def matrix(extent: int, result: int) -> torch.Tensor:
        eye = torch.eye(extent, dtype=torch.float64)[:, None]
        return torch.nn.functional.adaptive_avg_pool1d(eye, result)[:, 0].T

    matrices = {axis: matrix(shape[axis], int(out[axis])) for axis in axes}
    return _resample(importer, node, matrices)


@converts("upsample_nearest2d.vec", mode="nearest")
@converts("upsample_bilinear2d.vec", mode="bilinear")
@converts("upsample_bicubic2d.vec", mode="bicubic")
def upsample(importer: Importer, node: fx.Node, *, mode: str) -> relax.Expr:
    shape, out = importer.shape(node.args[0]), importer.shape(node)
    nearest = mode == "nearest"
    if not nearest and not node.meta["val"].dtype.is_floating_point:
        raise UnsupportedOperator([str(node.target)], "it rounds weighted sums of integers")
    factors = importer.argument(node, "scale_factors") or [None, None]
    aligned = not nearest and bool(importer.argument(node, "align_corners"))
    if not is_static(*shape[2:], *out[2:]):
        x = importer.tensor(node.args[0], accumulator(node.meta["val"].dtype))
        channels_last = hint(shape[1]) >= CONVOLUTION.many_channels
        if channels_last:  # as `_resample`
            x = importer.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))
        for axis, factor in zip((2, 3), factors, strict=True):
            at = axis - channels_last
            x = resizing.resized(importer, x, at, out[axis], factor, mode, aligned)
        return importer.emit(relax.op.permute_dims(x, [0, 3, 1, 2])) if channels_last else x
    corners = () if nearest else (aligned,)
    resize = getattr(aten, base_name(node))
    # The nearest element is computed in the precision of the image.
    is_single = nearest and node.meta["val"].dtype is not torch.float64
    precise = torch.float32 if is_single else torch.float64

    def matrix(extent: int, result: int, factor: float | None) -> torch.Tensor:
        # torch itself resizes the columns of the identity matrix, which is exact for every mode.
        columns = torch.eye(extent, dtype=precise).reshape(extent, 1, extent, 1)
        return resize(columns, [result, 1], *corners, factor, None)[:, 0, :, 0].T.double()

    matrices = {axis: matrix(shape[axis], int(out[axis]), factors[axis - 2]) for axis in (2, 3)}
    return _resample(importer, node, matrices)


def _resample(importer: Importer, node: fx.Node, matrices: dict[int, torch.Tensor]) -> relax.Expr:
    """Apply one sparse matrix ``[out, in]`` per axis, given by the few taps of each row. The image
    is transposed to channels last, where the taps of many channels form one vector; between
    convolutions it already is, and the transposes cancel.
    """
    dtype = accumulator(node.meta["val"].dtype)
    result = importer.tensor(node.args[0], dtype)
    shape = sizes_of(result.ty.shape)
    transposed = len(shape) == 4 and hint(shape[1]) >= CONVOLUTION.many_channels
    if transposed:
        result = importer.emit(relax.op.permute_dims(result, [0, 2, 3, 1]))
        matrices = {axis - 1: matrix for axis, matrix in matrices.items()}
    found = {axis: _only_tap(matrix) for axis, matrix in matrices.items()}
    if None not in found.values():
        out = sizes_of(result.ty.shape)
        for axis, matrix in matrices.items():
            out[axis] = matrix.shape[0]
        result = importer.emit_te(reading(found, out), result)
        matrices = {}
    for axis, matrix in matrices.items():
        positions, weights = _taps(matrix)
        if positions.shape[1] == 1 and matrix.shape[0] == matrix.shape[1]:
            continue  # the identity
        result = importer.emit_te(
            _take_taps,
            result,
            relax.const(positions),
            relax.const(weights, dtype_of(result)),
            axis,
            primfunc_name_hint="resample",
        )
    return importer.emit(relax.op.permute_dims(result, [0, 3, 1, 2])) if transposed else result


def _only_tap(matrix: torch.Tensor) -> places.Formula | None:
    """Return the formula for the tap of each row, if each row has one and there is a formula."""
    if not ((matrix != 0).sum(1) == 1).all() or not (matrix.sum(1) == 1).all():
        return None
    return places.formula_of(matrix.argmax(1), matrix.shape[1])


def _taps(matrix: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and weights of the elements of each row, ``[out, taps]``.

    A row with fewer than others takes its first element several times, with halves of its weight,
    which is exact. Another element of weight 0 would make the result NaN if it is not finite.
    """
    most = int((matrix != 0).sum(1).max())
    positions, weights = [], []
    for row in matrix:
        places = row.nonzero().flatten().tolist()
        factors = row[places].tolist()
        while len(places) < most:
            places.insert(0, places[0])
            factors[:1] = [factors[0] / 2] * 2
        positions.append(places)
        weights.append(factors)
    return np.array(positions, "int32"), np.array(weights)


def _take_taps(x: te.Tensor, positions: te.Tensor, weights: te.Tensor, axis: int) -> te.Tensor:
    shape = sizes_of(x.shape)
    shape[axis] = int(positions.shape[0])
    taps = int(positions.shape[1])

    def element(*indices: Any) -> Any:
        row = indices[axis]
        terms = [
            x(*indices[:axis], positions[row, tap], *indices[axis + 1 :])
            * (1.0 if taps == 1 else weights[row, tap])
            for tap in range(taps)
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    return te.compute(shape, element, name="resample")
