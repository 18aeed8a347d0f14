"""What passes share that rewrite the calls of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.passes.views import shape_of

_ADD, _MATMUL, _DESCRIBED = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("add", "matmul", "call_pure_packed")
)


def rewrite_main(
    ir_mod: tvm.IRModule, mutator: Callable[[tvm.IRModule], PyExprMutator]
) -> tvm.IRModule:
    """Let a mutator rewrite ``main``; functions that it adds become part of the module."""
    rewriting = mutator(ir_mod)
    rewriting.builder_.update_func(
        ir_mod.get_global_var("main"), rewriting.visit_expr(ir_mod["main"])
    )
    return rewriting.builder_.get()


def values_and_readers(
    function: relax.Function,
) -> tuple[dict[relax.Var, Expr], Counter[relax.Var]]:
    """Return what each variable is bound to, and how many bindings read it."""
    values = {found.var: found.value for block in function.body.blocks for found in block.bindings}
    readers: Counter[relax.Var] = Counter()
    for value in values.values():
        readers.update(relax.analysis.free_vars(value))
    return values, readers


def is_call(operator: tvm.ir.Op, value: Any) -> bool:
    """Whether a value is a call of an operator."""
    return isinstance(value, relax.Call) and value.op == operator


def linear(
    value: Any, values: Mapping[relax.Var, Expr], readers: Mapping[relax.Var, int]
) -> tuple[relax.Call, Expr] | None:
    """Return a product and the bias that is added to it, if a value is that.

    The product has one matrix on its right-hand side, and no other reader.
    """
    if not is_call(_ADD, value):
        return None
    for variable, bias in (value.args, reversed(value.args)):
        product = values.get(variable)
        if (
            is_call(_MATMUL, product)
            and readers[variable] == 1
            and len(shape_of(product.args[1])) == 2
            and shape_of(bias) == shape_of(product)[-1:]
            and len(shape_of(product)) > 1
        ):
            return product, bias
    return None


def stands_for(name: str, value: Any) -> bool:
    """Whether a value is a call by which a converter describes what a pass lowers."""
    if not is_call(_DESCRIBED, value):
        return False
    function = value.args[0]
    return isinstance(function, relax.ExternFunc) and str(function.global_symbol) == name
