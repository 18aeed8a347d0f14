"""Keeps the items of tuples out of the functions that FuseOps makes. FuseOps replaces a tuple
parameter by one parameter per item. With two tuples, it inserts the items at the original position
of each tuple, although the items of the other may have shifted it, and in the order of a hash table
of addresses: sometimes an LSTM's result replaces another's, and FuseTIR then refuses a function
with a missing parameter.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class SeparateItems(PyExprMutator):
    """Make these items outputs of their block, which FuseOps does not fuse; runs before it. Nothing
    is lost: items are not computed, and their users are fused as before.
    """

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Make an item of a call's result an output."""
        value = self.visit_expr(binding.value)
        is_item = isinstance(value, relax.TupleGetItem)
        if is_item and isinstance(self.lookup_binding(value.tuple_value), relax.Call):
            self.set_var_remap(binding.var, self.builder_.emit_output(value))
        else:
            super().visit_var_binding_(binding)
