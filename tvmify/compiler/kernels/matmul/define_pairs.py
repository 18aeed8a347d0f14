"""Adds the LLVM functions that bfloat16 products call; they are inlined."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import StringImm
from tvm.target import Target

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
        text = StringImm(pairs.definitions())
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, function.body)
        return function.with_body(body)
