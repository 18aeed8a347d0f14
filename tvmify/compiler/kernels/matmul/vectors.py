"""Products with a vector: plain sums, which the rules for reductions schedule.

A transposed matrix is read where it lies: along its columns as a sum of rows.
"""

from __future__ import annotations

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmify.compiler.kernels.common.legalizing import FUSIBLE, is_weight, plain, values_of
from tvmify.compiler.passes.views import is_transpose

#: TVM adds these up in another type.
_OTHERS = {"bool", "float16", "bfloat16"}


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.matmul`` of a vector."""
    ranks = [len(x.ty.shape) for x in call.args]
    dtypes = {str(x.ty.dtype) for x in (call, *call.args)}
    place = ranks.index(max(ranks))
    matrix, vector = call.args[place], call.args[1 - place]
    source = None if is_weight(builder, matrix) else untransposed(builder, matrix)
    if source is None or sorted(ranks) != [1, 2] or len(dtypes) > 1 or dtypes & _OTHERS:
        return plain(builder, call)

    def product(matrix: te.Tensor, vector: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, vector.shape[0]), "k")

        def element(i: tirx.Var) -> Expr:
            return te.sum(matrix[(i, k) if place else (k, i)] * vector[k], axis=k)

        return te.compute((matrix.shape[1 - place],), element, name="matmul")

    return builder.call_te(
        product, source, vector, primfunc_name_hint="matmul", primfunc_attrs=FUSIBLE
    )


def untransposed(builder: relax.BlockBuilder, right: Expr) -> Expr | None:
    """Return the tensor of which an operand is the transpose."""
    value = values_of(builder).get(right) if isinstance(right, relax.Var) else None
    return value.args[0] if is_transpose(value) else None
