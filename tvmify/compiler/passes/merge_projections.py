"""Compute the projections of one input that attention takes as one product.

Their weights are put side by side when they are packed. One product of three times the columns
starts its threads once and reads the input once, and is cut into pieces more evenly. The attention
kernel reads its operands out of the common result (see `tvmify.compiler.passes.lower_attention`);
for another reader each slice would be a copy, so other products stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax
from tvm.ir import Expr

from tvmify.compiler.passes.lower_attention import stands_for_attention

#: What may lie between a projection and attention.
_BETWEEN = ("relax.add", "relax.reshape", "relax.permute_dims")


def merge_projections() -> tvm.transform.Pass:
    """Return TVM's pass that merges products, for projections only."""
    return relax.transform.CombineParallelMatmul(_are_projections)


def _are_projections(
    x: relax.Var, weights: Sequence[Expr], _: object, bindings: Mapping[relax.Var, Expr]
) -> bool:
    users: dict[Expr, list[tuple[relax.Var, relax.Call]]] = {}
    for variable, value in bindings.items():
        for argument in value.args if isinstance(value, relax.Call) else ():
            users.setdefault(argument, []).append((variable, value))

    def leads_to_attention(variable: relax.Var) -> bool:
        return variable in users and all(
            stands_for_attention(call) or (_name(call) in _BETWEEN and leads_to_attention(result))
            for result, call in users[variable]
        )

    def is_projection(weight: Expr) -> bool:
        turned = bindings.get(weight)
        products = [result for result, call in users[weight] if call.args[0].same_as(x)]
        return (
            turned is not None
            and _name(turned) == "relax.permute_dims"
            and turned.args[0] not in bindings
            and all(leads_to_attention(product) for product in products)
        )

    return all(is_projection(weight) for weight in weights)


def _name(x: Expr) -> str:
    return x.op.name if isinstance(x, relax.Call) and isinstance(x.op, tvm.ir.Op) else ""
