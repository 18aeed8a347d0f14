"""Shared code of passes that rewrite calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx
from tvm.ir import Expr, GlobalVar
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.passes.views import shape_of

_ADD, _MATMUL, _DESCRIBED, _CALL_TIR = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("add", "matmul", "call_pure_packed", "call_tir")
)
#: See `join_calls`.
Join: TypeAlias = Callable[[tirx.PrimFunc, tirx.PrimFunc, int], "tirx.PrimFunc | None"]


def rewrite_program(
    ir_mod: tvm.IRModule, mutator: Callable[[tvm.IRModule], PyExprMutator]
) -> tvm.IRModule:
    """Let a mutator rewrite ``main``, and another one ``pack`` once weights are lifted. Functions
    that they add become part of the module.
    """
    for variable, function in ir_mod.functions_items():
        if isinstance(function, relax.Function):
            rewriting = mutator(ir_mod)
            rewriting.builder_.update_func(variable, rewriting.visit_expr(function))
            ir_mod = rewriting.builder_.get()
    return ir_mod


def values_and_readers(
    function: relax.Function,
) -> tuple[dict[relax.Var, Expr], Counter[relax.Var]]:
    """Return the value of each variable, and the number of bindings that read it."""
    values = {found.var: found.value for block in function.body.blocks for found in block.bindings}
    readers: Counter[relax.Var] = Counter()
    for value in values.values():
        readers.update(relax.analysis.free_vars(value))
    return values, readers


def value_read_once(
    x: Any, values: Mapping[relax.Var, Expr], readers: Mapping[relax.Var, int]
) -> Expr | None:
    """Return the value of a variable that has a single reader; None for anything else."""
    return values.get(x) if readers.get(x) == 1 else None


def join_calls(ir_mod: tvm.IRModule, join: Join) -> tvm.IRModule:
    """Replace two calls of TIR functions in ``main`` by one, if the first has no other users.

    Parameters
    ----------
    join
        Takes both functions, and the number of the operand of the second that the first computes.
        Returns a function that does the work of both, or None. Its parameters are those of the
        first and then the other ones of the second; it has a single result.
    """
    main = ir_mod["main"]
    joining = _JoiningCalls(ir_mod, join)
    blocks = [type(block)(joining.rewrite(block.bindings)) for block in main.body.blocks]
    if not any(joining.joined.values()):
        return ir_mod
    ir_mod = joining.builder.get()
    ir_mod["main"] = relax.Function(
        main.params, relax.SeqExpr(blocks, main.body.body), main.ret_ty, True, main.attrs
    )
    return ir_mod


class _JoiningCalls:
    """Rewrites bindings; functions that are joined repeatedly become one."""

    def __init__(self, ir_mod: tvm.IRModule, join: Join) -> None:
        self.ir_mod = ir_mod
        self.join = join
        self.builder = relax.BlockBuilder(ir_mod)
        self.joined: dict[tuple[GlobalVar, GlobalVar, int], GlobalVar | None] = {}
        self.readers: Counter[relax.Var] = Counter()
        relax.analysis.post_order_visit(ir_mod["main"], self._count)

    def _count(self, node: object) -> None:
        parts = {relax.Call: "args", relax.Tuple: "fields"}.get(type(node))
        if parts is not None:
            self.readers.update(x for x in getattr(node, parts) if isinstance(x, relax.Var))

    def rewrite(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        """Rewrite one binding block."""
        calls = {b.var: b for b in bindings if _is_call_tir(b.value)}
        kept = dict.fromkeys(bindings)
        for binding in calls.values():
            function, operands = binding.value.args
            for place, operand in enumerate(operands.fields):
                first = calls.get(operand)
                if first is None or self.readers[operand] > 1:
                    continue
                before, others = first.value.args
                joined = self._joined(before, function, place)
                if joined is None:
                    continue
                rest = [*operands.fields[:place], *operands.fields[place + 1 :]]
                call = relax.call_tir(joined, [*others.fields, *rest], binding.value.ty_args[0])
                del kept[first]
                kept[binding] = relax.VarBinding(binding.var, call)
                break
        return [replaced or binding for binding, replaced in kept.items()]

    def _joined(self, first: GlobalVar, second: GlobalVar, place: int) -> GlobalVar | None:
        key = first, second, place
        if key not in self.joined:
            function = self.join(self.ir_mod[first], self.ir_mod[second], place)
            name = f"{first.name_hint}_{second.name_hint}"
            self.joined[key] = function and self.builder.add_func(function, name)
        return self.joined[key]


def _is_call_tir(value: Expr) -> bool:
    return (
        isinstance(value, relax.Call)
        and value.op == _CALL_TIR
        and len(value.args) == 2
        and isinstance(value.ty_args[0], relax.TensorType)
    )


def is_call(operator: tvm.ir.Op, value: Any) -> bool:
    """Whether a value is a call of an operator."""
    return isinstance(value, relax.Call) and value.op == operator


def linear(
    value: Any, values: Mapping[relax.Var, Expr], readers: Mapping[relax.Var, int]
) -> tuple[relax.Call, Expr] | None:
    """Return a product and the bias added to it, if a value is their sum. The right-hand side of
    the product is a single matrix, and the product has no other users.
    """
    if not is_call(_ADD, value):
        return None
    for variable, bias in (value.args, reversed(value.args)):
        product = value_read_once(variable, values, readers)
        if (
            is_call(_MATMUL, product)
            and len(shape_of(product.args[1])) == 2
            and sizes.same_shape(shape_of(bias), shape_of(product)[-1:])
            and len(shape_of(product)) > 1
        ):
            return product, bias
    return None


def describes(name: str, value: Any) -> bool:
    """Whether a value is a call by which a converter describes an operator for a pass to lower."""
    if not is_call(_DESCRIBED, value):
        return False
    function = value.args[0]
    return isinstance(function, relax.ExternFunc) and str(function.global_symbol) == name
