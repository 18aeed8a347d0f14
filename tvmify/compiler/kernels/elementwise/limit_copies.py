"""Cuts chains of element-wise functions in which values are read several times. A schedule inlines
each function of a fused chain into the next, once for each place that reads it: ten writes to parts
of a tensor, each of which reads it twice, would be a thousand copies of the first.
"""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax, tirx
from tvm.ir import TensorLoad
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.kernels.common.patterns import Pattern, pattern_of
from tvmify.compiler.kernels.common.rewriting import collect
from tvmify.compiler.passes.compiler_pass import compiler_pass

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
#: The patterns of element-wise, broadcasting and injective functions.
_INLINED = (Pattern.ELEMENTWISE, Pattern.BROADCAST, Pattern.INJECTIVE)
#: How many elements a fused function may read for one of its result. Gates and activations of a
#: layer read some dozens.
_MOST_READS = 256


@compiler_pass
class LimitCopies(PyExprMutator):
    """Make values that many reads lead to outputs of their block, which FuseOps does not fuse; runs
    before it.
    """

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self._functions = ir_mod
        # How many elements each value reads for one of its own, if all before it is inlined.
        self._reads: dict[relax.Var, int] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Count the reads of a value; make it an output if they are too many."""
        reads = self._count(binding.value)
        if reads > _MOST_READS and isinstance(binding.var, relax.DataflowVar):
            value = self.visit_expr(binding.value)
            self.set_var_remap(binding.var, self.builder_.emit_output(value))
        else:
            self._reads[binding.var] = reads
            super().visit_var_binding_(binding)

    def _count(self, value: relax.Expr) -> int:
        if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
            return 1
        function = self._functions[value.args[0]]
        if pattern_of(function) not in _INLINED:
            return 1
        counts = _loads(function)
        given = zip(function.params, value.args[1].fields, strict=False)
        return max(1, sum(counts[buffer] * self._reads.get(x, 1) for buffer, x in given))


def _loads(function: tirx.PrimFunc) -> Counter[tirx.Var]:
    """Count how often the text of a function reads each tensor."""
    stores = collect(function.body, tirx.BufferStore)
    return Counter(load.source for store in stores for load in collect(store.value, TensorLoad))
