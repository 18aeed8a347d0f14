"""Cuts chains of element-wise functions in which values are read several times. A schedule inlines
each function of a fused chain into the next, once for each place that reads it: ten writes to parts
of a tensor, each of which reads it twice, would be a thousand copies of the first. And what is read
at indices would be computed again for each index.
"""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax, tirx
from tvm.ir import TensorLoad
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.kernels.common.patterns import Pattern, pattern_of
from tvmify.compiler.kernels.common.rewriting import collect
from tvmify.compiler.kernels.elementwise.mark_injective import gathered
from tvmify.compiler.passes.compiler_pass import compiler_pass

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
#: The patterns of element-wise, broadcasting and injective functions.
_INLINED = (Pattern.ELEMENTWISE, Pattern.BROADCAST, Pattern.INJECTIVE)
#: How many elements a fused function may read for one of its result. Gates and activations of a
#: layer read some dozens.
_MOST_READS = 256


@compiler_pass
class LimitCopies(PyExprMutator):
    """Make values that many reads lead to, or that are computed and then read at indices, outputs
    of their block, which FuseOps does not fuse; runs before it.
    """

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self._functions = ir_mod
        # How many elements each value reads for one of its own, if all before it is inlined.
        self._reads: dict[relax.Var, int] = {}
        self._indexed = _indexed(ir_mod)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Count the reads of a value; make it an output if they are too many, or at indices."""
        reads = self._count(binding.value)
        is_cut = reads > _MOST_READS or binding.var in self._indexed
        if is_cut and isinstance(binding.var, relax.DataflowVar):
            value = self.visit_expr(binding.value)
            self.set_var_remap(binding.var, self.builder_.emit_output(value))
        else:
            self._reads[binding.var] = reads
            super().visit_var_binding_(binding)

    def _count(self, value: relax.Expr) -> int:
        function = _inlined(self._functions, value)
        if function is None:
            return 1
        assert isinstance(value, relax.Call)
        counts = _loads(function)
        given = zip(function.params, value.args[1].fields, strict=False)
        return max(1, sum(counts[buffer] * self._reads.get(x, 1) for buffer, x in given))


def _inlined(ir_mod: tvm.IRModule, value: relax.Expr | None) -> tirx.PrimFunc | None:
    """Return the function that a value is a call of, if FuseOps may inline it."""
    if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
        return None
    function = ir_mod[value.args[0]]
    return function if pattern_of(function) in _INLINED else None


def _indexed(ir_mod: tvm.IRModule) -> set[relax.Var]:
    """Return the values that are computed and then read at indices, perhaps after moves such as a
    broadcast, which are inlined.
    """
    functions = (function for _, function in ir_mod.functions_items())
    bound = {
        binding.var: binding.value
        for function in functions
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        for binding in block.bindings
    }
    found: set[relax.Var] = set()
    for value in bound.values():
        function = _inlined(ir_mod, value)
        if function is None or not (read := gathered(function)):
            continue
        for parameter, x in zip(function.params, value.args[1].fields, strict=False):
            if parameter not in read:
                continue
            while (before := _inlined(ir_mod, bound.get(x))) is not None:
                if not _moves(before):
                    found.add(x)
                    break
                (x,) = bound[x].args[1].fields
    return found


def _moves(function: tirx.PrimFunc) -> bool:
    """Whether a function copies elements of one tensor to other places."""
    values = [store.value for store in collect(function.body, tirx.BufferStore)]
    return len(function.params) == 2 and len(values) == 1 and isinstance(values[0], TensorLoad)


def _loads(function: tirx.PrimFunc) -> Counter[tirx.Var]:
    """Count how often the text of a function reads each tensor."""
    stores = collect(function.body, tirx.BufferStore)
    return Counter(load.source for store in stores for load in collect(store.value, TensorLoad))
