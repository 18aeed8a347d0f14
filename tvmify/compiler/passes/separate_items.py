"""Keep the items of what a call returns out of the functions that FuseOps makes.

A function that takes a tuple apart gets its items from FuseOps instead, as one parameter each. With
two such tuples, FuseOps puts the items where each tuple was at first, although those of the other
may have moved it, and in the order of a hash table of addresses: at times an LSTM's result takes
the place of another's, and FuseTIR then refuses a function of which a parameter is missing.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class SeparateItems(PyExprMutator):
    """Make these items outputs of their block, which FuseOps does not fuse; runs before it.

    Nothing is lost: an item is not computed, and what reads it is fused as before.
    """

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Make an output of an item that a call returned."""
        value = self.visit_expr(binding.value)
        is_item = isinstance(value, relax.TupleGetItem)
        if is_item and isinstance(self.lookup_binding(value.tuple_value), relax.Call):
            self.set_var_remap(binding.var, self.builder_.emit_output(value))
        else:
            super().visit_var_binding_(binding)
