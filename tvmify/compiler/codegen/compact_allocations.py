"""Allocate as much of each intermediate tensor as the loop around it uses.

TVM derives this from indices. Of ``p // n`` and ``p % n`` with a size `n` that varies it derives
minima of quotients, and vectors of such a tensor would be loaded lane by lane. So where sizes vary,
tensors that several nests of loops share stay whole.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx

from tvmify.compiler import sizes
from tvmify.compiler.codegen.place_allocations import with_buffers
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class CompactAllocations:
    """``s_tir.transform.CompactBufferAllocation``, which does not see these tensors."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        root = function.body
        buffers = root.block.alloc_buffers if isinstance(root, s_tir.SBlockRealize) else ()
        whole = [buffer for buffer in buffers if not sizes.is_static(*buffer.shape)]
        if not whole:
            return _compacted(function)
        others = [buffer for buffer in buffers if buffer not in whole]
        hidden = function.with_body(with_buffers(root, root.block.body, others))
        root = _compacted(hidden).body
        buffers = [*root.block.alloc_buffers, *whole]
        return function.with_body(with_buffers(root, root.block.body, buffers))


def _compacted(function: tirx.PrimFunc) -> tirx.PrimFunc:
    module = tvm.IRModule({"main": function})
    return s_tir.transform.CompactBufferAllocation()(module)["main"]
