"""Replaces products by calls of a library that `libraries` chooses. A call in bfloat16 rounds its
result, so it is used only where the program rounds as well: for a product, or its sum with a bias,
whose only user is the cast. Products that `JoinProducts`, an earlier pass, has joined stay as they
are.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmify.compiler import sizes
from tvmify.compiler.aten.calls import Aten, aten
from tvmify.compiler.kernels.common.legalizing import WEIGHT_BYTES, weights_of
from tvmify.compiler.kernels.matmul import libraries, pairs
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.kernels.matmul.planning import workload
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import (
    is_call,
    linear,
    rewrite_program,
    value_read_once,
    values_and_readers,
)
from tvmify.compiler.passes.views import shape_of

#: Attribute of ``main``: the library of each product that one computes.
_CALLED = "tvmify.libraries"
_ASTYPE, _MATMUL, _PERMUTE = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("astype", "matmul", "permute_dims")
)


@compiler_pass
class CallLibraries:
    """Rewrite products before they are lowered; a later pass removes the dead code."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        calling = _Calling(ir_mod)
        rewritten = rewrite_program(ir_mod, lambda _: calling)
        if calling.called:
            main = rewritten["main"].with_attr(_CALLED, calling.called)
            known = int((main.attrs or {}).get(WEIGHT_BYTES, 0))
            rewritten["main"] = main.with_attr(WEIGHT_BYTES, known + sum(calling.read.values()))
        return rewritten


def called(ir_mod: tvm.IRModule) -> dict[str, str]:
    """Return the products of a lowered program that libraries compute, with their libraries."""
    attributes = ir_mod["main"].attrs or {}
    return {str(work): str(library) for work, library in attributes.get(_CALLED, {}).items()}


class _Linear(NamedTuple):
    """A product of the program with a weight of two axes.

    ``is_rounded``: the result is cast to bfloat16, and read by nothing else before.
    """

    left: Expr
    weight: Expr
    bias: Expr | None
    is_rounded: bool


@mutator
class _Calling(PyExprMutator):
    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.values, self.readers = values_and_readers(ir_mod["main"])
        self.weights = weights_of(ir_mod["main"])
        #: The library for each workload and layout of the weights; None for our own kernel.
        self.chosen: dict[tuple[plans.Workload, bool], libraries.Library | None] = {}
        self.called: dict[str, str] = {}
        #: Bytes of the weights that our own kernels no longer read.
        self.read: dict[Expr, int] = {}

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        found = self.found(op)
        made = None if found is None else self.by_library(op, found)
        return call if made is None else made

    def found(self, op: relax.Call) -> _Linear | None:
        """Return the product, with or without a bias, that ends with a call."""
        value: Expr | None = op
        is_rounded = is_call(_ASTYPE, op) and str(op.ty.dtype) == "bfloat16"
        if is_rounded:
            value = value_read_once(op.args[0], self.values, self.readers)
        product, bias = linear(value, self.values, self.readers) or (value, None)
        if not is_call(_MATMUL, product):
            return None
        left, weight = product.args
        rows, own = shape_of(left), shape_of(weight)
        if not sizes.is_static(*rows, *own):  # library calls have static shapes
            return None
        dtypes = {str(x.ty.dtype) for x in (left, weight, product)}
        fits = len(rows) > 1 and len(own) == 2 and own[1] > 1 and min(rows) > 0
        if not fits or dtypes != {"float32"} or weight not in self.weights or left in self.weights:
            return None
        return _Linear(left, weight, bias, is_rounded)

    def by_library(self, op: relax.Call, found: _Linear) -> relax.Expr | None:
        """Return the library call that computes a product, if a library is chosen."""
        machine = Microarchitecture.current()
        rows, (depth, columns) = prod(shape_of(op)[:-1]), shape_of(found.weight)
        narrow = pairs.rows_of(self.builder_, found.left, [found.weight], rows, machine)
        paired = narrow is not None
        if paired != found.is_rounded:
            return None
        if paired and found.bias is not None and not pairs.was_narrow(found.bias, self.values):
            return None
        work = workload((1, rows, columns, depth), "float32", paired=paired)
        transposed = self.values.get(found.weight)
        is_transposed = is_call(_PERMUTE, transposed)
        if (kind := (work, is_transposed)) not in self.chosen:
            shapes = shape_of(found.left), shape_of(op)
            self.chosen[kind] = libraries.choose(work, machine, *shapes, is_transposed)
        library = self.chosen[kind]
        if library is None:
            return None
        weight = transposed.args[0] if is_transposed else found.weight
        fixed = [weight, *([] if found.bias is None else [found.bias])]
        if narrow is not None:
            operands = [self.visit_expr(narrow), *map(self.narrowed, fixed)]
        else:
            operands = [self.visit_expr(x) for x in (found.left, *fixed)]
        self.called[str(work)] = str(library)
        if self.readers[found.weight] == 1:
            self.read[found.weight] = depth * columns * bits_of(library.dtype) // 8

        def body(record: Aten, *values: Any) -> Any:
            return library.write(record, *values, transposed=is_transposed)

        return aten(operands, shape_of(op), library.dtype, body)

    def narrowed(self, x: Expr) -> Expr:
        """Return the bfloat16 tensor that a tensor was cast from."""
        value = self.values.get(x)
        if is_call(_ASTYPE, value):
            return self.visit_expr(value.args[0])
        return self.builder_.emit(relax.op.astype(self.visit_expr(x), "bfloat16"))
