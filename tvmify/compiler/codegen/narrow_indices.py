"""Narrow indices to 32 bits, as TVM does, but not where `fetch_ahead` marked a loop. There, LLVM
extends each index to an address separately, and runs out of registers
(docs/measurements/registers.md).
"""

from __future__ import annotations

import tvm
from tvm import tirx

from tvmify.compiler.kernels.common.prefetch import FETCHES
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class NarrowIndices:
    """Run ``NarrowDataType`` on a module of one function, unless it prefetches."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite the function."""
        ((_, function),) = ir_mod.functions_items()
        marked = FETCHES in (function.attrs or {})
        return ir_mod if marked else tirx.transform.NarrowDataType(32)(ir_mod)
