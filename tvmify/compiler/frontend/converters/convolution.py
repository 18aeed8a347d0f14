"""Convolutions in one, two and three dimensions, all by ``relax.nn.conv2d``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, topi

from tvmify.compiler.frontend.converters import images, volumes
from tvmify.compiler.frontend.converters.images import Steps
from tvmify.compiler.frontend.converters.reduction import multiplier
from tvmify.compiler.frontend.converters.registry import converts, per_axis
from tvmify.compiler.sizes import sizes_of

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


@converts("convolution.default")
def convolution(importer: Importer, node: fx.Node) -> relax.Expr:
    source, kernel, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    dtype = multiplier(node.meta["val"].dtype)
    rank = len(importer.shape(source)) - 2
    stride, padding, dilation = (per_axis(v, rank) for v in (stride, padding, dilation))
    before, after = list(padding), list(padding)
    if not transposed:
        source, more_before, more_after = _unpadded(importer, source, rank)  # type: ignore[arg-type]
        before = [p + more for p, more in zip(padding, more_before, strict=True)]
        after = [p + more for p, more in zip(padding, more_after, strict=True)]
    x, weight = importer.tensor(source, dtype), importer.tensor(kernel, dtype)
    extra = per_axis(output_padding, rank)
    # A sequence is an image of one column, since threads divide the rows.
    kind = volumes if rank == 3 else images
    if transposed and groups == 1 and max(dilation) == 1:
        if rank == 1:
            x, weight = _of_one_column(importer, x, weight)
            stride, padding, extra = [*stride, 1], [*padding, 0], [*extra, 0]
        result = kind.transposed(importer, x, weight, stride, padding, extra)
        return _with_bias(importer, result, bias, rank, dtype)
    if transposed:
        extents = importer.shape(kernel)[2:]
        x, weight = _as_plain(importer, x, weight, stride, int(groups))  # type: ignore[arg-type]
        before = [d * (k - 1) - p for d, k, p in zip(dilation, extents, padding, strict=True)]
        after = [b + e for b, e in zip(before, extra, strict=True)]
        x, before, after = _cropped(importer, x, before, after)
        stride = [1] * rank
    if rank == 1:
        x, weight = _of_one_column(importer, x, weight)
        stride, dilation, before, after = [*stride, 1], [*dilation, 1], [*before, 0], [*after, 0]
    steps = Steps(stride, dilation, before, after)
    result = kind.convolve(importer, x, weight, steps, int(groups))  # type: ignore[arg-type]
    result = _with_bias(importer, result, bias, rank, dtype)
    if rank < 3:
        return result
    return volumes.as_volumes(importer, result, importer.shape(source)[0])


def _unpadded(importer: Importer, x: fx.Node, rank: int) -> tuple[fx.Node, list[int], list[int]]:
    """Return the tensor that `x` pads with zeros, and the padding before and after each axis.
    Models ported from TensorFlow pad explicitly, more after than before.
    """
    is_pad = x.target is torch.ops.aten.constant_pad_nd.default
    is_zero = is_pad and importer.argument(x, "value") == 0
    pads = list(importer.argument(x, "pad")) if is_zero else []
    if not pads or min(pads) < 0 or len(pads) > 2 * rank:
        return x, [0] * rank, [0] * rank
    # The padding of the last axis comes first.
    before, after = ([*pads[i::2], *[0] * rank][:rank][::-1] for i in (0, 1))
    return x.args[0], before, after


def _of_one_column(importer: Importer, *sequences: relax.Expr) -> tuple[relax.Expr, ...]:
    return tuple(importer.emit(relax.op.expand_dims(tensor, 3)) for tensor in sequences)


def _with_bias(
    importer: Importer, result: relax.Expr, bias: Any, rank: int, dtype: torch.dtype
) -> relax.Expr:
    if bias is not None:
        channels = importer.shape(bias)[0]
        per_channel = [1, channels] + [1] * (len(result.ty.shape) - 2)
        shift = relax.op.reshape(importer.tensor(bias, dtype), per_channel)
        result = importer.emit(relax.op.add(result, importer.emit(shift)))
    return importer.emit(relax.op.squeeze(result, [3])) if rank == 1 else result


def _as_plain(
    importer: Importer, x: relax.Expr, weight: relax.Expr, stride: list[int], groups: int
) -> tuple[relax.Expr, relax.Expr]:
    """Turn a dilated, grouped or volumetric transposed convolution into a plain one.

    The input is dilated with zeros by the stride, and convolved with the mirrored kernel, with
    input and output channels exchanged. The zeros cost work, but the plain convolution is
    scheduled, and the kernel is mirrored in the pack function.
    """
    if any(step != 1 for step in stride):
        x = importer.emit_te(topi.nn.dilate, x, [1, 1, *stride], primfunc_name_hint="dilate")
    channels, per_group, *extents = (int(e) for e in weight.ty.shape)
    grouped = [groups, channels // groups, per_group, *extents]
    weight = importer.emit(relax.op.reshape(weight, grouped))
    axes = [0, 2, 1, *range(3, len(grouped))]
    weight = importer.emit(relax.op.permute_dims(weight, axes))
    plain = [groups * per_group, channels // groups, *extents]
    weight = importer.emit(relax.op.reshape(weight, plain))
    for axis, extent in enumerate(extents, start=2):
        if extent > 1:
            weight = importer.emit(relax.op.flip(weight, axis))
    return x, weight


def _cropped(
    importer: Importer, x: relax.Expr, before: list[int], after: list[int]
) -> tuple[relax.Expr, list[int], list[int]]:
    """Crop the input where the padding is negative."""
    shape = sizes_of(x.ty.shape)
    low = [0, 0, *(max(-b, 0) for b in before)]
    high = [*shape[:2], *(e - max(-a, 0) for e, a in zip(shape[2:], after, strict=True))]
    if low != [0] * len(shape) or high != shape:
        axes = list(range(len(shape)))
        x = importer.emit(relax.op.strided_slice(x, axes, low, high))
    return x, [max(b, 0) for b in before], [max(a, 0) for a in after]
