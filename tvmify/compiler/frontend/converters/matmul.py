"""Matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx
from tvm import relax

from tvmify.compiler.frontend.converters.reduction import multiplier
from tvmify.compiler.frontend.converters.registry import converts, dtype_of

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


def _operands(importer: Importer, node: fx.Node, *values: Any) -> list[relax.Expr]:
    """Return operands in the dtype to accumulate in: float32 for half precision."""
    dtype = multiplier(node.meta["val"].dtype)
    operands = (importer.operand(value, dtype) for value in values)
    # bound to a variable, since TVM's CombineParallelMatmul takes no constants
    return [x if isinstance(x, relax.Var) else importer.emit(x) for x in operands]


@converts("matmul.default", "mm.default", "bmm.default")
def matmul(importer: Importer, node: fx.Node) -> relax.Expr:
    x, y = _operands(importer, node, *node.args[:2])
    return relax.op.matmul(x, y)


@converts("linear.default")
def linear(importer: Importer, node: fx.Node) -> relax.Expr:
    x, weight = _operands(importer, node, *node.args[:2])
    transposed = importer.emit(relax.op.permute_dims(weight))
    product = importer.emit(relax.op.matmul(x, transposed))
    bias = importer.argument(node, "bias")
    if bias is None:
        return product
    return relax.op.add(product, *_operands(importer, node, bias))


@converts("addmm.default", "baddbmm.default")
def add_product(importer: Importer, node: fx.Node) -> relax.Expr:
    """``beta * addend + alpha * (x @ y)``; as in torch, a zero beta ignores NaN in the addend."""
    addend, x, y = _operands(importer, node, *node.args[:3])
    beta, alpha = importer.argument(node, "beta"), importer.argument(node, "alpha")
    product = importer.emit(relax.op.matmul(x, y))
    if alpha != 1:
        product = importer.emit(
            relax.op.multiply(product, importer.number(alpha, dtype_of(product)))
        )
    if beta == 0:
        return relax.op.broadcast_to(product, list(importer.shape(node)))
    if beta != 1:
        addend = importer.emit(relax.op.multiply(addend, importer.number(beta, dtype_of(addend))))
    return relax.op.add(product, addend)
