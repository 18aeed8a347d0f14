"""Joins products of one input into one kernel if their results are combined into one value. Gated
layers do so: ``silu(gate(x)) * up(x)`` in Llama, GeGLU, ``sigmoid(a(x)) * tanh(b(x))``, with or
without biases. The kernel of the first product would write a result for the second to read;
instead, one kernel accumulates both and applies the epilogue before anything is stored (see
`tvmify.compiler.kernels.matmul.joined`). Products with other users are not joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import WEIGHT_BYTES, weights_of
from tvmify.compiler.kernels.matmul import joined
from tvmify.compiler.microarchitecture import bits_of
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import is_call, rewrite_program
from tvmify.compiler.passes.views import shape_of

_MATMUL = tvm.ir.Op.get("relax.matmul")
#: Operators allowed between the products and the combined value.
_ELEMENTWISE = frozenset(
    tvm.ir.Op.get(f"relax.{name}")
    for name in (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum"),
        *(
            "astype",
            "negative",
            "abs",
            "square",
            "sqrt",
            "exp",
            "log",
            "erf",
            "sigmoid",
            "tanh",
            "clip",
        ),
        *("nn.relu", "nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu"),
    )
)


@compiler_pass
class JoinProducts:
    """Lower the joined products; runs before LegalizeOps, which lowers the others."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        main = ir_mod["main"]
        weights = {weight for group in groups(main) for weight in group.weights}
        if not weights:
            return ir_mod
        ir_mod["main"] = _weights_first(main)
        ir_mod = rewrite_program(ir_mod, _Joining)
        total = sum(prod(shape_of(w)) * bits_of(str(w.ty.dtype)) // 8 for w in weights)
        ir_mod["main"] = ir_mod["main"].with_attr(WEIGHT_BYTES, total)
        return ir_mod


@dataclass(frozen=True)
class Group:
    """Products of the same rows whose results are combined into one value."""

    products: tuple[relax.Call, ...]

    @property
    def weights(self) -> list[Expr]:
        """Their right-hand sides."""
        return [product.args[1] for product in self.products]


def groups(main: relax.Function) -> list[Group]:
    """Find the products to join."""
    values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    readers: dict[Expr, set[Expr]] = {}
    for variable, value in values.items():
        for read in relax.analysis.free_vars(value):
            readers.setdefault(read, set()).add(variable)
    for read in relax.analysis.free_vars(main.body.body):
        readers.setdefault(read, set()).add(main.body.body)
    weights = weights_of(main)
    alike: dict[object, list[Expr]] = {}
    for variable, value in values.items():
        if is_call(_MATMUL, value) and _may_join(value, weights):
            x, weight = value.args
            key = x, shape_of(weight), str(value.ty.dtype)
            alike.setdefault(key, []).append(variable)
    return [
        Group(tuple(values[product] for product in group))
        for products in alike.values()
        if len(products) > 1
        for group in _joining(products, values, readers)
    ]


def _may_join(product: relax.Call, weights: frozenset[relax.Var]) -> bool:
    x, weight = product.args
    rows, own = shape_of(x), shape_of(weight)
    return (
        weight in weights
        and x not in weights
        and len(rows) > 1
        and len(own) == 2
        and own[-1] > 1
        and min(sizes.hints((*rows, *own))) > 0
        and x.ty.dtype == weight.ty.dtype == product.ty.dtype
    )


def _joining(
    products: list[Expr], values: dict[Expr, Expr], readers: dict[Expr, set[Expr]]
) -> Iterator[list[Expr]]:
    """Yield those of some products, all of one shape, that become one value.

    Element-wise operators combine them into this value, and nothing else reads what these compute.
    """
    shape = shape_of(products[0])
    made = {product: {product} for product in products}
    for variable, value in values.items():
        if isinstance(value, relax.Call) and value.op in _ELEMENTWISE:
            known = [made[argument] for argument in value.args if argument in made]
            if known and sizes.same_shape(shape_of(variable), shape):
                made[variable] = {variable}.union(*known)
    left = set(products)
    for variable, parts in reversed(made.items()):
        inner = parts - {variable}
        group = [product for product in products if product in inner]
        closed = all(readers.get(part, set()) <= parts for part in inner)
        if len(group) > 1 and left.issuperset(group) and closed:
            left.difference_update(group)
            yield group


def _weights_first(main: relax.Function) -> relax.Function:
    """Move computations of weights before all others: a joined product needs all its weights."""
    weights = weights_of(main)
    blocks = [
        type(block)(sorted(block.bindings, key=lambda binding: binding.var not in weights))
        for block in main.body.blocks
    ]
    body = relax.SeqExpr(blocks, main.body.body)
    return relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)


@mutator
class _Joining(PyExprMutator):
    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.groups = {p: group for group in groups(ir_mod["main"]) for p in group.products}
        self.joined: dict[Group, Expr] = {}

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        group = self.groups.get(op)
        if group is None:
            return call
        if group not in self.joined:
            weights = [self.visit_expr(weight) for weight in group.weights]
            self.joined[group] = joined.legalize(self.builder_, call.args[0], weights)
        return joined.one_of(self.builder_, self.joined[group], group.products.index(op))
