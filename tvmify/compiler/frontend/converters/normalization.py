"""Layer, group, instance and batch normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.backend import is_for_gpu
from tvmify.compiler.frontend.converters import volumes
from tvmify.compiler.frontend.converters.reduction import accumulator, deviations
from tvmify.compiler.frontend.converters.registry import converts, dtype_of
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.sizes import Size, as_number, bounds, is_static, product, same, sizes_of
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

#: With strict accuracy, layer norms of more elements are summed in float64. After ReLU, float32
#: sums stayed within the limit for 3136 elements, but not for 12544.
_LONG = 4096


@converts("native_layer_norm.default")
def native_layer_norm(importer: Importer, node: fx.Node) -> tuple[relax.Expr, None, None]:
    return layer_norm(importer, node), None, None


@converts("layer_norm.default")
def layer_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    names = ("normalized_shape", "weight", "bias", "eps")
    shape, weight, bias, eps = (importer.argument(node, name) for name in names)
    dtype = accumulator(node.args[0].meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(node.args[0], dtype)
    gamma = _scale(importer, weight, list(shape), 1.0, dtype)
    beta = _scale(importer, bias, list(shape), 0.0, dtype)
    axes = list(range(-len(shape), 0))
    long = choice.is_strict() and bounds(product(shape))[1] > _LONG
    if dtype is torch.float64 or long:
        return _layer_norm_by_steps(importer, x, gamma, beta, axes, float(eps))
    return importer.emit(relax.op.nn.layer_norm(x, gamma, beta, axes, epsilon=float(eps)))


def _layer_norm_by_steps(
    importer: Importer,
    x: relax.Expr,
    gamma: relax.Expr,
    beta: relax.Expr,
    axes: list[int],
    eps: float,
) -> relax.Expr:
    """Normalize in float64, for which TVM has no layer_norm, or with statistics in float64."""
    centred = deviations(importer, x, axes).centred
    variance = importer.emit(relax.op.mean(importer.emit(centred * centred), axes, keepdims=True))
    deviation = importer.emit(relax.op.sqrt(variance + relax.const(eps, str(x.ty.dtype))))
    return importer.emit(centred / deviation * gamma + beta)


@converts("native_group_norm.default")
def group_norm(importer: Importer, node: fx.Node) -> tuple[relax.Expr, None, None]:
    source, weight, bias, _, _channels, _, groups, eps = node.args
    dtype = accumulator(source.meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(source, dtype)
    norm = _GroupNorm(int(groups), weight, bias, float(eps), dtype)  # type: ignore[arg-type]
    return _normalized(importer, x, norm), None, None


@dataclass(frozen=True)
class _GroupNorm:
    """A normalization of groups of channels, one sample at a time.

    Attributes
    ----------
    groups
        How many there are.
    weight, bias
        Of each channel; None for ones and zeros.
    dtype
        The dtype of the tensor that is normalized, and that of its sums.
    """

    groups: Size
    weight: Any
    bias: Any
    eps: float
    dtype: torch.dtype


def _normalized(
    importer: Importer,
    x: relax.Expr,
    norm: _GroupNorm,
) -> relax.Expr:
    """Normalize each group of channels of each sample."""
    rank = len(x.ty.shape)
    if rank not in (4, 5) or is_for_gpu():  # a GPU would launch ten kernels instead of one
        return _normalized_rows(importer, x, norm)
    if rank == 4:
        return _normalized_images(importer, x, norm)
    batch, _, depth, *_ = sizes_of(x.ty.shape)
    images = _normalized_images(importer, volumes.slices(importer, x), norm, depth)
    return volumes.as_volumes(importer, images, batch)


def _normalized_images(
    importer: Importer,
    x: relax.Expr,
    norm: _GroupNorm,
    depth: int = 1,
) -> relax.Expr:
    """As `_normalized`, with operators that adopt the layout of neighbouring convolutions. As in
    PyTorch's own kernel, each element takes one multiplication and one addition. Rows are summed
    first, and then their sums, since one long sum loses more digits; those of any length are sums
    of sums anyway. `depth` consecutive images are one sample.
    """
    emit = importer.emit
    count, channels = sizes_of(x.ty.shape.values[:2])
    grouped = [count // depth, depth, norm.groups, _of_each(channels, norm.groups)]
    shared = [axis for axis in (1, 3) if grouped[axis] > 1]

    def of_group(x: relax.Expr, combine: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
        """Combine the numbers of a group's channels, and return the result for each channel."""
        if not shared:
            return x
        x = emit(combine(emit(relax.op.reshape(x, grouped))))
        x = emit(relax.op.broadcast_to(x, grouped))
        return emit(relax.op.reshape(x, [count, channels, 1, 1]))

    def mean(x: relax.Expr) -> relax.Expr:
        is_fixed = is_static(*sizes_of(x.ty.shape)[2:])
        for axes in ([3], [2]) if is_fixed else ([2, 3],):
            x = emit(relax.op.mean(x, axes, keepdims=True))
        return of_group(x, lambda x: relax.op.mean(x, shared, keepdims=True))

    def first(x: relax.Expr) -> relax.Expr:
        zeros, ones = [0] * len(shared), [1] * len(shared)
        # Otherwise the size of a slice of a symbolic axis would be unknown.
        x = emit(relax.op.strided_slice(x, [2, 3], [0, 0], [1, 1], assume_inbound=True))
        return of_group(
            x, lambda x: relax.op.strided_slice(x, shared, zeros, ones, assume_inbound=True)
        )

    def shifted() -> relax.Expr:
        # less is lost, as in `deviations`; each pass subtracts again, so that nothing is stored
        return emit(x - origin)

    def per_channel(scale: Any, default: float) -> relax.Expr:
        scale = _scale(importer, scale, [channels], default, norm.dtype)
        return emit(relax.op.reshape(scale, [1, channels, 1, 1]))

    origin = first(x)
    means = mean(shifted())
    centred = emit(shifted() - means)
    variance = emit(mean(emit(centred * centred)) + relax.const(norm.eps, str(x.ty.dtype)))
    scale = emit(emit(relax.op.rsqrt(variance)) * per_channel(norm.weight, 1.0))
    shift = emit(per_channel(norm.bias, 0.0) - emit(means * scale))
    return emit(emit(shifted() * scale) + shift)


def _normalized_rows(
    importer: Importer,
    x: relax.Expr,
    norm: _GroupNorm,
) -> relax.Expr:
    """As `_normalized`, in one function. The groups are rows in memory, and the reduction rule
    fuses the three passes over each.
    """
    shape = sizes_of(x.ty.shape)
    grouped = [shape[0], norm.groups, _of_each(shape[1], norm.groups), product(shape[2:])]
    scales = [importer.tensor(w, norm.dtype) for w in (norm.weight, norm.bias) if w is not None]

    def group_norm(x: te.Tensor, *scales: te.Tensor) -> te.Tensor:
        channels = x.shape[2]
        count = as_number(product(x.shape[2:]), x.dtype)

        def total(name: str, element: Any) -> te.Tensor:
            axes = [
                te.reduce_axis((0, extent), axis)
                for extent, axis in zip(x.shape[2:], "ks", strict=True)
            ]
            return te.compute(
                x.shape[:2], lambda n, g: te.sum(element(n, g, *axes), axis=axes), name=name
            )

        def shifted(n: Any, g: Any, k: Any, i: Any) -> Any:
            # less is lost in sums of equal numbers, as in `deviations`
            return x(n, g, k, i) - x(n, g, 0, 0)

        def centred(n: Any, g: Any, k: Any, i: Any) -> Any:
            return shifted(n, g, k, i) - sums(n, g) / count

        sums = total("sums", shifted)
        squares = total("squares", lambda *i: centred(*i) * centred(*i))

        def element(n: Any, g: Any, k: Any, i: Any) -> Any:
            variance = squares(n, g) / count + tirx.const(norm.eps, x.dtype)
            result = centred(n, g, k, i) * tirx.rsqrt(variance)
            per_channel = iter(scales)
            if norm.weight is not None:
                result = result * next(per_channel)(g * channels + k)
            return result + next(per_channel)(g * channels + k) if norm.bias is not None else result

        return te.compute(x.shape, element, name="group_norm")

    rows = importer.emit(relax.op.reshape(x, grouped))
    normal = importer.emit_te(group_norm, rows, *scales)
    return importer.emit(relax.op.reshape(normal, shape))


def _of_each(channels: Size, groups: Size) -> Size:
    """Return how many channels a group has."""
    return 1 if same(channels, groups) else channels // groups


@converts("_native_batch_norm_legit_no_training.default")
def batch_norm(importer: Importer, node: fx.Node) -> tuple[relax.Expr, None, None]:
    """Scale and shift each element by factors that depend on weights only. The factors are lifted
    to the pack function, or folded into a convolution (see
    `tvmify.compiler.passes.fold_batch_norm`).
    """
    source, weight, bias, mean, variance, _, eps = node.args
    dtype = accumulator(source.meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(source, dtype)
    shape = importer.shape(source)
    per_channel = [1, shape[1]] + [1] * (len(shape) - 2)
    deviation = relax.op.sqrt(
        relax.op.add(importer.tensor(variance, dtype), relax.const(float(eps), dtype_of(x)))
    )
    scale = relax.op.divide(_scale(importer, weight, [shape[1]], 1.0, dtype), deviation)
    scale = importer.emit(scale)
    shift = relax.op.negative(relax.op.multiply(importer.tensor(mean, dtype), scale))
    if bias is not None:
        shift = relax.op.add(importer.tensor(bias, dtype), shift)
    scaled = relax.op.multiply(x, importer.emit(relax.op.reshape(scale, per_channel)))
    shift = importer.emit(relax.op.reshape(importer.emit(shift), per_channel))
    return importer.emit(relax.op.add(importer.emit(scaled), shift)), None, None


@converts("_native_batch_norm_legit.no_stats")
def norm_by_own_statistics(importer: Importer, node: fx.Node) -> tuple[relax.Expr, None, None]:
    """The decomposition of instance norm: statistics of each channel over batch and space."""
    source, weight, bias, _, _, eps = node.args
    dtype = accumulator(source.meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(source, dtype)
    shape = importer.shape(source)
    if shape[0] == 1:
        norm = _GroupNorm(shape[1], weight, bias, float(eps), dtype)
        return _normalized(importer, x, norm), None, None
    axes = [0, *range(2, len(shape))]
    centred = deviations(importer, x, axes).centred
    variance = relax.op.mean(relax.op.multiply(centred, centred), axes, True)
    deviation = relax.op.sqrt(relax.op.add(variance, relax.const(float(eps), dtype_of(x))))
    result = importer.emit(relax.op.divide(centred, deviation))
    return _per_channel(importer, result, weight, bias, dtype), None, None


@converts("_native_batch_norm_legit_functional.default")
def training_batch_norm(importer: Importer, node: fx.Node) -> tuple[relax.Expr | None, ...]:
    """Normalize by the statistics of the batch; also return the new running statistics."""
    source, weight, bias, mean, variance, training, momentum, eps = node.args
    if not training:
        raise UnsupportedOperator([str(node.target)], "there is a converter for training mode only")
    dtype = accumulator(source.meta["val"].dtype)  # type: ignore[union-attr]
    x = importer.tensor(source, dtype)
    shape = importer.shape(source)
    axes = [0, *range(2, len(shape))]
    number = dtype_of(x)
    first, offset, centred = deviations(importer, x, axes)
    center = importer.emit(relax.op.add(first, offset))
    spread = importer.emit(relax.op.mean(relax.op.multiply(centred, centred), axes, True))
    deviation = relax.op.sqrt(relax.op.add(spread, relax.const(float(eps), number)))  # type: ignore[arg-type]
    result = importer.emit(relax.op.divide(centred, deviation))

    def unbiased(variance: relax.Expr) -> relax.Expr:
        count = importer.number(product(shape[a] for a in axes), number)
        others = importer.emit(relax.op.subtract(count, relax.const(1, number)))
        others = importer.emit(relax.op.maximum(others, relax.const(1, number)))
        return importer.emit(relax.op.multiply(variance, relax.op.divide(count, others)))

    def moved(old: Any, new: relax.Expr) -> relax.Expr:
        new = importer.emit(relax.op.reshape(new, [shape[1]]))
        rate = relax.const(float(momentum), number)  # type: ignore[arg-type]
        rest = relax.const(1 - float(momentum), number)  # type: ignore[arg-type]
        kept = importer.emit(relax.op.multiply(importer.tensor(old, dtype), rest))
        return importer.emit(relax.op.add(kept, importer.emit(relax.op.multiply(new, rate))))

    return (
        _per_channel(importer, result, weight, bias, dtype),
        None,
        None,
        moved(mean, center),
        moved(variance, unbiased(spread)),  # as in ATen
    )


def _per_channel(
    importer: Importer, x: relax.Expr, weight: Any, bias: Any, dtype: torch.dtype
) -> relax.Expr:
    """Scale and shift each channel, as far as weight and bias are given."""
    shape = x.ty.shape
    per_channel = [1, int(shape[1])] + [1] * (len(shape) - 2)
    if weight is not None:
        scale = relax.op.reshape(importer.tensor(weight, dtype), per_channel)
        x = importer.emit(relax.op.multiply(x, scale))
    if bias is not None:
        shift = relax.op.reshape(importer.tensor(bias, dtype), per_channel)
        x = importer.emit(relax.op.add(x, shift))
    return x


def _scale(
    importer: Importer, weight: Any, shape: list[int], default: float, dtype: torch.dtype
) -> relax.Expr:
    if weight is not None:
        return importer.tensor(weight, dtype)
    fill = relax.const(default, dtype_name(dtype))
    return importer.emit(relax.op.full(relax.ShapeExpr(shape), fill))
