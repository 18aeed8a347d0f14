"""Three-dimensional convolutions by convolutions of images, which have schedules. A kernel of depth
k covers k slices of a volume at a time: an image with k times as many channels. The copy that
concatenates them is cheap compared to the products. A transposed convolution computes the k output
slices of each input slice as channels of one image, and adds those that overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tvm import relax, te, tirx

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


class Depth(NamedTuple):
    """How a kernel moves along the depth."""

    stride: int
    dilation: int
    before: int
    after: int


def as_images(
    importer: Importer, x: relax.Expr, weight: relax.Expr, depth: Depth
) -> tuple[relax.Expr, relax.Expr]:
    """Return images ``[batch * depth, channels, …]`` and the weights that they are convolved with.

    Parameters
    ----------
    x, weight
        ``[batch, channels, depth, height, width]``, and the same for the kernel.
    """
    batch, channels, deep, height, width = (int(extent) for extent in x.ty.shape)
    filters, per_group, size, *window = (int(extent) for extent in weight.ty.shape)
    reach = depth.dilation * (size - 1) + 1
    out = (deep + depth.before + depth.after - reach) // depth.stride + 1

    def side_by_side(volume: te.Tensor) -> te.Tensor:
        def element(b: Any, y: Any, x: Any, c: Any) -> Any:
            place = c // per_group % size
            channel = c // (per_group * size) * per_group + c % per_group
            at = b % out * depth.stride + place * depth.dilation - depth.before
            value = volume[b // out, tirx.max(tirx.min(at, deep - 1), 0), y, x, channel]
            if depth.before == 0 and depth.after <= 0:
                return value
            inside = tirx.all(at >= 0, at < deep)
            return tirx.if_then_else(inside, value, tirx.const(0, volume.dtype))

        return te.compute((batch * out, height, width, size * channels), element, name="slices")

    if (size, depth.stride, depth.before, depth.after) == (1, 1, 0, 0):
        images = slices(importer, x)
    else:
        x = importer.emit(relax.op.permute_dims(x, [0, 2, 3, 4, 1]))
        images = importer.emit_te(side_by_side, x)
        images = importer.emit(relax.op.permute_dims(images, [0, 3, 1, 2]))
    weight = importer.emit(relax.op.permute_dims(weight, [0, 2, 1, 3, 4]))
    weight = importer.emit(relax.op.reshape(weight, [filters, size * per_group, *window]))
    return images, weight


def slices(importer: Importer, x: relax.Expr) -> relax.Expr:
    """Return images ``[batch * depth, channels, …]`` of volumes ``[batch, channels, depth, …]``."""
    batch, channels, deep, height, width = (int(extent) for extent in x.ty.shape)
    x = importer.emit(relax.op.permute_dims(x, [0, 2, 3, 4, 1]))
    x = importer.emit(relax.op.reshape(x, [batch * deep, height, width, channels]))
    return importer.emit(relax.op.permute_dims(x, [0, 3, 1, 2]))


def as_volumes(importer: Importer, images: relax.Expr, batch: int) -> relax.Expr:
    """Return ``[batch, channels, depth, …]`` of images ``[batch * depth, channels, …]``."""
    count, channels, height, width = (int(extent) for extent in images.ty.shape)
    images = importer.emit(relax.op.permute_dims(images, [0, 2, 3, 1]))
    shape = [batch, count // batch, height, width, channels]
    volumes = importer.emit(relax.op.reshape(images, shape))
    return importer.emit(relax.op.permute_dims(volumes, [0, 4, 1, 2, 3]))


def transposed(
    importer: Importer,
    x: relax.Expr,
    weight: relax.Expr,
    stride: list[int],
    padding: list[int],
    extra: list[int],
) -> relax.Expr:
    """Emit a transposed convolution of volumes, without groups and dilation."""
    batch, channels, slices, height, width = (int(extent) for extent in x.ty.shape)
    _, filters, size, *window = (int(extent) for extent in weight.ty.shape)
    x = importer.emit(relax.op.permute_dims(x, [0, 2, 1, 3, 4]))
    x = importer.emit(relax.op.reshape(x, [batch * slices, channels, height, width]))
    weight = importer.emit(relax.op.permute_dims(weight, [0, 2, 1, 3, 4]))
    weight = importer.emit(relax.op.reshape(weight, [channels, size * filters, *window]))
    images = importer.emit(
        relax.op.nn.conv2d_transpose(
            x, weight, strides=stride[1:], padding=padding[1:] * 2, output_padding=extra[1:]
        )
    )
    images = importer.emit(relax.op.permute_dims(images, [0, 2, 3, 1]))
    out = (slices - 1) * stride[0] - 2 * padding[0] + size + extra[0]
    whole = size == stride[0] and padding[0] == 0 and extra[0] == 0

    def added_up(slice_of: te.Tensor) -> te.Tensor:
        def element(b: Any, z: Any, y: Any, x: Any, c: Any) -> Any:
            shifted = z + padding[0]
            total: Any = tirx.const(0, slice_of.dtype)
            for tap in range(-(-size // stride[0])):
                place = shifted % stride[0] + tap * stride[0]
                at = shifted // stride[0] - tap
                inside = tirx.all(place < size, at >= 0, at < slices)
                near = tirx.max(tirx.min(at, slices - 1), 0)
                value = slice_of[b * slices + near, y, x, tirx.min(place, size - 1) * filters + c]
                if whole:
                    return slice_of[b * slices + at, y, x, place * filters + c]
                total = total + tirx.if_then_else(inside, value, tirx.const(0, slice_of.dtype))
            return total

        shape = (batch, out, *slice_of.shape[1:3], filters)
        return te.compute(shape, element, name="added_up")

    volumes = importer.emit_te(added_up, images)
    return importer.emit(relax.op.permute_dims(volumes, [0, 4, 1, 2, 3]))
