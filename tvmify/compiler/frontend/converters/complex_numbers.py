"""Operators on complex numbers, which are pairs of floats along a last axis, as `view_as_real` has
them. Rotary positions are mostly these: a view, a product, and a view back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.aten.bridge import PARTS
from tvmify.compiler.aten.operators import base_name
from tvmify.compiler.frontend.converters.registry import converts_complex
from tvmify.compiler.kernels.elementwise.scalar import broadcast_element
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.dtypes import dtype_name

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

#: The real and the imaginary part of an element.
Pair = tuple[Any, Any]


def _add(x: Pair, y: Pair) -> Pair:
    return x[0] + y[0], x[1] + y[1]


def _subtract(x: Pair, y: Pair) -> Pair:
    return x[0] - y[0], x[1] - y[1]


def _multiply(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _conjugate(x: Pair) -> Pair:
    return x[0], -x[1]


def _negate(x: Pair) -> Pair:
    return -x[0], -x[1]


def _join(real: Pair, imaginary: Pair) -> Pair:
    return real[0], imaginary[0]


ELEMENTWISE: dict[str, Callable[..., Pair]] = {
    "_conj": _conjugate,
    "add": _add,
    "complex": _join,
    "conj_physical": _conjugate,
    "mul": _multiply,
    "neg": _negate,
    "sub": _subtract,
}


@converts_complex("_conj.default", "conj_physical.default", "complex.default", "neg.default")
@converts_complex(
    "add.Tensor", "mul.Tensor", "sub.Tensor", "add.Scalar", "mul.Scalar", "sub.Scalar"
)
def elementwise(importer: Importer, node: fx.Node) -> relax.Expr:
    """Compute both parts of each element from those of the operands, which are broadcast. The parts
    of a row are one axis here, so that they fill vectors.
    """
    if node.kwargs or node.args[2:] not in ((), (1,)):
        raise UnsupportedOperator(
            [str(node.target)], "it has arguments besides its operands, such as alpha"
        )
    operands = node.args[:2]
    dtype = _part_dtype(node)
    function, shape = ELEMENTWISE[base_name(node)], importer.shape(node)
    nodes = list(dict.fromkeys(value for value in operands if isinstance(value, fx.Node)))

    def computed(*tensors: te.Tensor) -> te.Tensor:
        known = dict(zip(nodes, tensors, strict=True))

        def element(*indices: Any) -> Any:
            *before, place = indices
            at, part = [*before, place // 2] if shape else [], place % 2

            def pair(value: Any) -> Pair:
                if isinstance(value, (int, float, complex)):
                    number = complex(value)
                    return tirx.const(number.real, dtype), tirx.const(number.imag, dtype)
                if not value.meta["val"].is_complex():
                    return broadcast_element(known[value], at, shape), tirx.const(0, dtype)
                return tuple(
                    broadcast_element(known[value], [*at, i], [*shape, 2]) for i in range(2)
                )

            return tirx.Select(part == 0, *function(*map(pair, operands)))

        row = shape[-1] * 2 if shape else 2
        return te.compute([*shape[:-1], row], element, name=base_name(node))

    tensors = [_parts(importer, value, dtype) for value in nodes]
    rows = importer.emit_te(computed, *tensors, primfunc_name_hint=f"complex_{base_name(node)}")
    return relax.op.reshape(rows, [*shape, 2])


@converts_complex("view_as_complex.default", "view_as_real.default", "resolve_conj.default")
@converts_complex("clone.default", "alias.default")
def same(importer: Importer, node: fx.Node) -> relax.Expr:
    _part_dtype(node)
    return importer.tensor(node.args[0])


def _part_dtype(node: fx.Node) -> str:
    """Return the dtype of the parts of the numbers that a call takes or returns.

    Raises
    ------
    UnsupportedOperator
        There are none for the type, such as complex32, or it takes several.
    """
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_complex()}
    if len(dtypes) != 1 or not dtypes <= set(PARTS):
        raise UnsupportedOperator(
            [str(node.target)], "its complex dtype is not supported, or its tensors have several"
        )
    return dtype_name(PARTS[dtypes.pop()])


def _parts(importer: Importer, value: fx.Node, dtype: str) -> relax.Expr:
    x = importer.env[value]
    return x if str(x.ty.dtype) == dtype else importer.emit(relax.op.astype(x, dtype))
