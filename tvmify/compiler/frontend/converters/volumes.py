"""Three-dimensional convolutions by convolutions of images, which have schedules.

A kernel of depth k covers k slices of a volume at a time: an image with k times as many channels.
The copy that concatenates them is cheap compared to the products, but not to those of a depthwise
kernel, which adds up the windows of k slices instead. A transposed convolution computes the k
output slices of each input slice as channels of one image, and adds those that overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tvm import relax, te, tirx

from tvmify.compiler.backend import is_for_gpu
from tvmify.compiler.frontend.converters.images import Steps
from tvmify.compiler.frontend.converters.images import convolve as convolve_images
from tvmify.compiler.frontend.converters.images import transposed as transposed_images
from tvmify.compiler.kernels.common.legalizing import FUSIBLE, OPAQUE
from tvmify.compiler.kernels.conv import depthwise
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.microarchitecture import Microarchitecture

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


def convolve(
    importer: Importer, x: relax.Expr, weight: relax.Expr, steps: Steps, groups: int
) -> relax.Expr:
    """Emit a convolution of volumes; return images, of which `as_volumes` makes volumes.

    Parameters
    ----------
    x, weight
        ``[batch, channels, depth, height, width]``, and the same for the kernel.
    """
    filters, per_group, size, *window = (int(extent) for extent in weight.ty.shape)
    in_plane = steps.without(0)
    if (size, *steps.along(0)) == (1, 1, 1, 0, 0):
        weight = importer.emit(relax.op.squeeze(weight, [2]))
        return convolve_images(importer, slices(importer, x), weight, in_plane, groups)
    deep = _Depth(size, *steps.along(0))
    x = importer.emit(relax.op.permute_dims(x, [0, 2, 3, 4, 1]))
    has_elements = 0 not in [int(extent) for extent in x.ty.shape]
    if filters == groups and per_group == 1 and has_elements and not is_for_gpu():
        return _depthwise(importer, x, weight, deep, in_plane)

    def side_by_side(volume: te.Tensor) -> te.Tensor:
        batch, depth, height, width, channels = (int(extent) for extent in volume.shape)

        def element(b: Any, y: Any, x: Any, c: Any) -> Any:
            if groups > 1:
                tap = c // per_group % size
                channel = c // (per_group * size) * per_group + c % per_group
                return deep.seen(volume, b, tap, (y, x, channel))
            # The pieces of a row one by one: in each, the guard is the same for all channels.
            *taps, value = (
                deep.seen(volume, b, tap, (y, x, c - tap * channels)) for tap in range(size)
            )
            for number, piece in reversed(list(enumerate(taps, start=1))):
                value = tirx.if_then_else(c < number * channels, piece, value)
            return value

        shape = (batch * deep.results(depth), height, width, size * channels)
        return te.compute(shape, element, name="slices")

    # Not fused with a transpose before it: guarded reads across memory are slow.
    images = importer.emit_te(side_by_side, x, primfunc_attrs=OPAQUE)
    images = importer.emit(relax.op.permute_dims(images, [0, 3, 1, 2]))
    weight = importer.emit(relax.op.permute_dims(weight, [0, 2, 1, 3, 4]))
    weight = importer.emit(relax.op.reshape(weight, [filters, size * per_group, *window]))
    return convolve_images(importer, images, weight, in_plane, groups)


class _Depth(NamedTuple):
    """How a kernel of some size moves along the depth."""

    size: int
    stride: int
    dilation: int
    before: int
    after: int

    def results(self, depth: int) -> int:
        """Return how many slices the result of a volume has."""
        reach = self.dilation * (self.size - 1) + 1
        return (depth + self.before + self.after - reach) // self.stride + 1

    def seen(self, volume: te.Tensor, b: Any, tap: Any, place: tuple[Any, ...]) -> Any:
        """Return an element of the slice that a tap sees.

        Parameters
        ----------
        volume
            ``[batch, depth, height, width, channels]``.
        b
            Which of the slices of the result, those of all volumes one after the other.
        place
            Row, column and channel.
        """
        depth = int(volume.shape[1])
        out = self.results(depth)
        at = b % out * self.stride + tap * self.dilation - self.before
        value = volume[(b // out, tirx.max(tirx.min(at, depth - 1), 0), *place)]
        if self.before == 0 and self.after <= 0:
            return value
        inside = tirx.all(at >= 0, at < depth)
        return tirx.if_then_else(inside, value, tirx.const(0, volume.dtype))


def _depthwise(
    importer: Importer, x: relax.Expr, weight: relax.Expr, deep: _Depth, steps: Steps
) -> relax.Expr:
    """Emit the kernel for images, each result of which is a sum over slices.

    Parameters
    ----------
    x, weight
        ``[batch, depth, height, width, channels]``, ``[channels, 1, depth, height, width]``.
    """
    batch, depth, height, width, channels = (int(extent) for extent in x.ty.shape)
    size = (int(weight.ty.shape[3]), int(weight.ty.shape[4]))
    top, left, bottom, right = *steps.before, *steps.after
    window = Window(
        size,
        (steps.stride[0], steps.stride[1]),
        (steps.dilation[0], steps.dilation[1]),
        (top, left, bottom, right),
    )
    count = batch * deep.results(depth)
    images = (count * deep.size, height, width, channels)
    out = (count, *window.results((height, width)), channels)
    dtype = str(x.ty.dtype)
    kernel, pack = depthwise.template(
        images, out, window, dtype, Microarchitecture.current(), deep.size
    )

    def depthwise_volume(volume: te.Tensor, packed: te.Tensor) -> te.Tensor:
        def element(b: Any, *place: Any) -> Any:
            return deep.seen(volume, b // deep.size, b % deep.size, place)

        return kernel(te.compute(images, element, name="slices"), packed)

    weight = importer.emit(relax.op.reshape(weight, [channels, deep.size * size[0], size[1], 1]))
    packed = importer.emit_te(pack, weight, primfunc_name_hint="pack_depthwise_volume")
    result = importer.emit_te(depthwise_volume, x, packed, primfunc_attrs=FUSIBLE)
    return importer.emit(relax.op.permute_dims(result, [0, 3, 1, 2]))


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
    images = transposed_images(importer, x, weight, stride[1:], padding[1:], extra[1:])
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
