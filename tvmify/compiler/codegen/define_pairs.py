"""Adds the LLVM functions that bfloat16 products call; they are inlined."""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from tvmify.compiler.codegen.llvm import Definitions
from tvmify.compiler.kernels.matmul import pairs
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class DefinePairs:
    """Define the functions that `pairs.lower_sum` calls, for the target whose scope is open."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        machine = Microarchitecture.of(Target.current(allow_none=False))
        if pairs.PAIRS not in function.attrs or not machine.multiplies_pairs:
            return function
        definitions = Definitions()
        for name, text in pairs.definitions().items():
            definitions.add(name, text)
        return definitions.added_to(function, function.body)
