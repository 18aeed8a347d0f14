"""Merges the leading axes of products into one axis of rows, if several are symbols. A tile of rows
is then cut at the end of all rows only, not at every item of the batch. `CancelTransposes` sinks
the reshapes below what follows, so that whole chains of layers become flat.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.views import shape_of

_MATMUL = tvm.ir.Op.get("relax.matmul")


@compiler_pass
class FlattenRows(PyExprMutator):
    """``matmul(x, w)`` becomes ``reshape(matmul(reshape(x), w))``, with two axes inside."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        #: Flattened inputs, so that products of one input keep sharing it.
        self.flat: dict[relax.Expr, relax.Var] = {}

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Flatten one product."""
        call = super().visit_call_(op)
        if not isinstance(call, relax.Call) or call.op != _MATMUL:
            return call
        x, weight = call.args
        *lead, depth = shape_of(x)
        rows = [size for size in lead if not sizes.is_one(size)]
        is_flat = len(rows) < 2 and not (rows and sizes.is_one(lead[-1]))
        if sizes.is_static(*lead) or is_flat or len(shape_of(weight)) != 2:
            return call
        if x not in self.flat:
            self.flat[x] = self.builder_.emit(relax.op.reshape(x, [sizes.product(rows), depth]))
        product = relax.op.matmul(self.flat[x], weight, str(call.ty.dtype))
        return relax.op.reshape(self.builder_.emit(product), shape_of(call))
