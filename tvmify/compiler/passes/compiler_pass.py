"""Declares passes: a class defines the rewrite, and a decorator turns it into a TVM pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import tvm
from tvm import tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmify.compiler.passes.rewriting import rewrite_program


@runtime_checkable
class OfModules(Protocol):
    """Rewrites a whole module."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Return the rewritten module; it may be the same object, changed."""
        ...


@runtime_checkable
class OfKernels(Protocol):
    """Rewrites every TIR function separately."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Return the rewritten function, or the same one."""
        ...


def compiler_pass(
    cls: type[PyExprMutator | OfModules | OfKernels],
) -> Callable[[], tvm.transform.Pass]:
    """Turn a class into a function that makes a TVM pass of that name, as in ``relax.transform``.

    A ``PyExprMutator``, whose ``__init__`` takes the module, rewrites the program (see
    `rewrite_program`). Any other class is `OfModules` or `OfKernels`.
    """
    name = cls.__name__
    if issubclass(cls, PyExprMutator):
        mutating = mutator(cls)
        return lambda: tvm.transform.module_pass(
            lambda ir_mod, _: rewrite_program(ir_mod, mutating), opt_level=0, name=name
        )
    if issubclass(cls, OfModules):
        return lambda: tvm.transform.module_pass(
            lambda ir_mod, _: cls().rewrite_module(ir_mod), opt_level=0, name=name
        )
    return lambda: tirx.transform.prim_func_pass(
        lambda function, _, __: cls().rewrite_kernel(function), opt_level=0, name=name
    )
