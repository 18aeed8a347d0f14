"""Convolutions whose windows tile the images, as products: of a matrix of patches, and the weight.

Examples are windows of one pixel, and the patch embeddings of vision transformers.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax
from tvm.ir import Expr

from tvmify.compiler.aten.calls import Aten, aten
from tvmify.compiler.passes.views import static_shape


def has_patches(convolution: relax.Call) -> bool:
    """Whether each element of the images is in exactly one window; the layout is channels last."""
    attributes = convolution.attrs
    (_, *extents, _), (_, *kernel, _) = map(static_shape, convolution.args)
    return (
        [int(stride) for stride in attributes.strides] == kernel
        and not any(int(size) for size in attributes.padding)
        and all(int(step) == 1 for step in attributes.dilation)
        and int(attributes.groups) == 1
        and all(extent % size == 0 for extent, size in zip(extents, kernel, strict=True))
    )


def is_of_pixels(convolution: relax.Call) -> bool:
    """Whether each window is one pixel, so that the pixels are the patches."""
    return math.prod(static_shape(convolution.args[1])[1:3]) == 1


def multiply(
    builder: relax.BlockBuilder,
    images: Expr,
    weight: Expr,
    bias: Expr | None,
    *,
    shape: list[int],
    has_relu: bool = False,
) -> Expr:
    """Return a convolution, for which `has_patches` holds, as a product.

    Parameters
    ----------
    bias
        An element for each channel, of the dtype of the images.
    shape
        The shape of the result.
    has_relu
        Whether ReLU follows the bias.
    """
    channels, *kernel, _ = static_shape(weight)
    patches = _patches(builder, images, kernel)
    weight = builder.emit(relax.op.reshape(weight, [channels, static_shape(patches)[-1]]))
    rows = static_shape(patches)[0]
    if has_relu and bias is not None and rows > 1:
        dtype = str(images.ty.dtype)
        product = aten([patches, weight, bias], [rows, channels], dtype, _with_relu)
        return builder.emit(relax.op.reshape(builder.emit(product), shape))
    # Of operators that `ReshapeRows` and `CallLibraries` know: a kernel may compute a single row.
    transposed = builder.emit(relax.op.permute_dims(weight))
    product = builder.emit(relax.op.matmul(patches, transposed))
    if bias is not None:
        product = builder.emit(relax.op.add(product, bias))
    result = builder.emit(relax.op.reshape(product, shape))
    return builder.emit(relax.op.nn.relu(result)) if has_relu else result


def _with_relu(record: Aten, patches: Any, weight: Any, bias: Any) -> Any:
    """Add bias and ReLU in the kernel of the product: cuBLASLt has both."""
    transposed = record("transpose", weight, 0, 1)
    return record("_addmm_activation", bias, patches, transposed, 1, 1, False)


def _patches(builder: relax.BlockBuilder, images: Expr, kernel: list[int]) -> Expr:
    """Return the elements of each window as a row, in the order of a filter."""
    count, height, width, channels = static_shape(images)
    (high, wide), length = kernel, math.prod(kernel) * channels
    if high * wide > 1:
        split = [count, height // high, high, width // wide, wide, channels]
        images = builder.emit(relax.op.reshape(images, split))
        images = builder.emit(relax.op.permute_dims(images, [0, 1, 3, 2, 4, 5]))
    rows = count * (height // high) * (width // wide)
    return builder.emit(relax.op.reshape(images, [rows, length]))
