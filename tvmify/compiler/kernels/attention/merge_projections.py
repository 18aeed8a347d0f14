"""Merges products of one input: projections for attention, and narrow heads. Their weights are
concatenated when they are packed. One product with three times the columns forks threads once,
reads the input once, and is divided more evenly. The attention kernel reads its operands from the
common result (see `lower_attention`); other users would have to copy each slice, or read it with
gaps. So other products are not merged, unless all their columns fit in one vector, of which each
would fill only a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import ATTENTION
from tvmify.compiler.kernels.attention.lower_attention import describes_attention
from tvmify.compiler.kernels.common.loops import element_count
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.passes.views import shape_of

#: What may lie between a projection and attention.
_BETWEEN = ("relax.add", "relax.reshape", "relax.permute_dims")


def merge_projections() -> tvm.transform.Pass:
    """Return TVM's pass that merges products, for those only."""
    return relax.transform.CombineParallelMatmul(_shall_merge)


def merge_for_attention() -> tvm.transform.Pass:
    """Return the same pass, for projections that attention takes and no others."""
    return relax.transform.CombineParallelMatmul(_lead_to_attention)


def _shall_merge(
    x: relax.Var, weights: Sequence[Expr], _: object, bindings: Mapping[relax.Var, Expr]
) -> bool:
    if not all(_is_transposed_parameter(weight, bindings) for weight in weights):
        return False
    return _are_narrow(x, weights) or _are_projections(x, weights, bindings)


def _lead_to_attention(
    x: relax.Var, weights: Sequence[Expr], _: object, bindings: Mapping[relax.Var, Expr]
) -> bool:
    transposed = all(_is_transposed_parameter(weight, bindings) for weight in weights)
    return transposed and _are_projections(x, weights, bindings)


def _is_transposed_parameter(weight: Expr, bindings: Mapping[relax.Var, Expr]) -> bool:
    """Whether this is the transpose of a weight of a linear layer, which has one shape."""
    transposed = bindings.get(weight)
    return (
        transposed is not None
        and _name(transposed) == "relax.permute_dims"
        and transposed.args[0] not in bindings
        and sizes.is_static(*shape_of(weight))
    )


def _are_narrow(x: relax.Var, weights: Sequence[Expr]) -> bool:
    """Whether all columns fit into one vector, and there are rows enough to pay for the slices."""
    columns = [shape_of(weight)[-1] for weight in weights]
    lanes = Microarchitecture.current().lanes(bits_of(str(x.ty.dtype)))
    # A single column is a sum of vectors along the rows, not a product.
    saved = (sum(count > 1 for count in columns) - 1) * element_count(shape_of(x))
    return sum(columns) <= lanes and saved >= ATTENTION.worth_merging


def _are_projections(
    x: relax.Var, weights: Sequence[Expr], bindings: Mapping[relax.Var, Expr]
) -> bool:
    users: dict[Expr, list[tuple[relax.Var, relax.Call]]] = {}
    for variable, value in bindings.items():
        for argument in value.args if isinstance(value, relax.Call) else ():
            users.setdefault(argument, []).append((variable, value))

    def leads_to_attention(variable: relax.Var) -> bool:
        return variable in users and all(
            describes_attention(call) or (_name(call) in _BETWEEN and leads_to_attention(result))
            for result, call in users[variable]
        )

    return all(
        leads_to_attention(product)
        for weight in weights
        for product, call in users[weight]
        if call.args[0].same_as(x)
    )


def _name(x: Expr) -> str:
    return x.op.name if isinstance(x, relax.Call) and isinstance(x.op, tvm.ir.Op) else ""
