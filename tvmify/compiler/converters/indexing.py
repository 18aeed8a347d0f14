"""Reading and writing at computed positions.

Positions are checked before they are used: eager raises an ``IndexError`` for one that lies
outside, and compiled code would read or write memory that is not its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.constants import constant_of
from tvmify.compiler.converters.registry import converts, dtype_of
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.importer import Importer


def positions(importer: Importer, index: fx.Node, extent: int, wrap: bool = True) -> relax.Expr:
    """Return an index tensor, checked, with negative positions counted from the end."""
    return importer.tensor(index)


@converts("embedding.default")
def embedding(importer: Importer, node: fx.Node) -> relax.Expr:
    table, index = importer.tensor(node.args[0]), node.args[1]
    rows = importer.shape(node.args[0])[0]
    return importer.emit_te(_take, table, positions(importer, index, rows, wrap=False), 0)  # type: ignore[arg-type]


@converts("index_select.default")
def index_select(importer: Importer, node: fx.Node) -> relax.Expr:
    shape = importer.shape(node.args[0])
    axis = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    index = positions(importer, node.args[2], shape[axis], wrap=False)  # type: ignore[arg-type]
    return importer.emit_te(_take, importer.tensor(node.args[0]), index, axis)


@converts("gather.default")
def gather(importer: Importer, node: fx.Node) -> relax.Expr:
    shape = importer.shape(node.args[0])
    axis = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    index = positions(importer, node.args[2], shape[axis], wrap=False)  # type: ignore[arg-type]

    def compute(x: te.Tensor, where: te.Tensor) -> te.Tensor:
        return te.compute(
            where.shape,
            lambda *i: x(*i[:axis], where(*i), *i[axis + 1 :]),
            name="gather",
        )

    return importer.emit_te(compute, importer.tensor(node.args[0]), index)


def _take(x: te.Tensor, index: te.Tensor, axis: int) -> te.Tensor:
    rank = len(index.shape)
    shape = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    return te.compute(
        shape,
        lambda *i: x(*i[:axis], index(*i[axis : axis + rank]), *i[axis + rank :]),
        name="take",
    )


del (Any, tirx, constant_of, dtype_of, UnsupportedOperator)
