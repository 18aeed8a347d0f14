"""1×1 convolutions as matrix products, with gates before them fused."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, te
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import call_template
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.conv.windows import Window, shapes_of
from tvmify.compiler.kernels.matmul.template import Product
from tvmify.compiler.microarchitecture import Microarchitecture


def legalize_gated(builder: relax.BlockBuilder, call: Call, image: Expr, gate: Expr) -> Expr | None:
    """Lower a pointwise ``conv2d(image * gate)``; return None for others. Squeeze-and-excitation
    ends this way. Multiplying rows that are in L1 costs next to nothing; multiplying the image
    costs a pass over it.
    """
    attributes, kernel = call.attrs, sizes.sizes_of(call.args[1].ty.shape)
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    shape, dtype = sizes.sizes_of(image.ty.shape), str(call.ty.dtype)
    if len(shape) != 4:  # a number is not a gate
        return None
    n, _, _, channels = shape
    alike = sizes.same_shape(gate.ty.shape, [n, 1, 1, channels]) and not any(
        str(x.ty.dtype) != dtype for x in (image, gate)
    )
    window = Window.of(attributes, kernel[1:3])
    pointwise = window.is_pointwise and window.strides == (1, 1) and int(attributes.groups) == 1
    if (
        layouts != ("NHWC", "OHWI", "NHWC")
        or not alike
        or not pointwise
        or 0 in sizes.hints(shape + kernel)
    ):
        return None
    _, _, out = shapes_of(call, *call.args)
    of_any_size = not sizes.is_static(*out[1:])
    # In plain variables: TVM simplifies the number of tiles of other rows in several ways.
    inside = sizes.Variables().of(map(sizes.simplified, out)) if of_any_size else tuple(out)
    left = (sizes.product(inside[:-1]), channels)
    product = Product.of(left, (channels, kernel[0]), inside, dtype, Microarchitecture.current())
    packed = builder.emit(
        builder.call_te(product.pack_pointwise, call.args[1], primfunc_name_hint="pack_conv2d_1x1")
    )
    operands, hint = [image, gate, packed], "gated_conv2d_1x1"
    if of_any_size:
        return call_template(builder, product.with_gated, operands, out, inside, hint)
    return builder.call_te(
        product.with_gated,
        *operands,
        primfunc_name_hint=hint,
        primfunc_attrs=Pattern.FUSIBLE.attributes,
    )


def strided(product: Product, window: Window) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the product with the pixels that a 1×1 window with strides sees."""
    if window.strides == (1, 1):
        return product.with_packed
    down, across = window.strides

    def template(image: te.Tensor, packed: te.Tensor) -> te.Tensor:
        left = (image.shape[0], *product.left[1:])
        pixels = te.compute(
            left, lambda b, y, x, c: image[b, y * down, x * across, c], name="strided"
        )
        return product.with_packed(pixels, packed)

    return template
