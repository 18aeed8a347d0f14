"""Joins 1×1 convolutions with the depthwise convolutions of their results."""

from __future__ import annotations

import tvm
from tvm import tirx

from tvmify.compiler.kernels.conv.expanded_depthwise import ExpandedDepthwise
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import join_calls


@compiler_pass
class JoinDepthwise:
    """Replace two calls of fused functions by one, where the first has no other reader."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        machine = Microarchitecture.current()

        def join(first: tirx.PrimFunc, second: tirx.PrimFunc, place: int) -> tirx.PrimFunc | None:
            both = ExpandedDepthwise.of(first, second, machine) if place == 0 else None
            return both and both.function()

        return join_calls(ir_mod, join)
