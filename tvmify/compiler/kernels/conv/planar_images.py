"""Lets convolutions of few channels read NCHW images, as PyTorch stores them. Kernels broadcast
each input into all lanes, so any layout will do, and transposing a photograph to channels last is a
pass over it with vectors of three elements (docs/measurements/convolutions.md).
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.views import permutation

_CONV2D = tvm.ir.Op.get("relax.nn.conv2d")
#: From planes to channels last.
_TO_NHWC = [0, 2, 3, 1]


@compiler_pass
class PlanarImages(PyExprMutator):
    """``conv2d(permute_dims(x))`` becomes a convolution of `x`; runs before LegalizeOps."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Let a convolution read what its image was permuted from."""
        call = super().visit_call_(op)
        if not isinstance(call, relax.Call) or call.op != _CONV2D:
            return call
        transposed, attributes = self.lookup_binding(call.args[0]), call.attrs
        axes = permutation(transposed)
        if axes is None:
            return call
        layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
        outputs, *window, channels = (int(size) for size in call.args[1].ty.shape)
        # Windows of one pixel are products; a convolution of one channel to one is depthwise.
        direct = max(window) > 1 and int(attributes.groups) == 1 and (outputs, channels) != (1, 1)
        few = direct and channels <= CONVOLUTION.planar_channels
        if layouts != ("NHWC", "OHWI", "NHWC") or axes != _TO_NHWC or not few:
            return call
        return relax.op.nn.conv2d(
            transposed.args[0],
            call.args[1],
            strides=attributes.strides,
            padding=attributes.padding,
            dilation=attributes.dilation,
            data_layout="NCHW",
            kernel_layout="OHWI",
            out_layout="NHWC",
        )
