"""Drops the virtual machine's argument checks, and repeated shapes. The executor has compared
dtypes and shapes with those that the program was compiled for; the checks would cost more than a
small kernel. Those that determine a symbol are kept.
"""

from __future__ import annotations

import tvm
from tvm import relax

from tvmify.compiler.passes.compiler_pass import compiler_pass

_MATCH_SHAPE, _MAKE_SHAPE = "vm.builtin.match_shape", "vm.builtin.make_shape"
CHECKS = ("vm.builtin.check_tensor_info", _MATCH_SHAPE)
#: The virtual machine's code for storing the extent of an axis.
_STORE = 1


@compiler_pass
class TrustArguments:
    """Remove calls of `CHECKS`; runs last, on the virtual machine's own operators."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite every Relax function."""
        for variable, function in ir_mod.functions_items():
            if isinstance(function, relax.Function):
                shapes: dict[str, relax.Var] = {}
                blocks = [
                    relax.BindingBlock(
                        [_once(b, shapes) for b in block.bindings if not _is_check(b)]
                    )
                    for block in function.body.blocks
                ]
                body = relax.SeqExpr(blocks, function.body.body)
                ir_mod[variable] = relax.Function(
                    function.params, body, function.ret_ty, function.is_pure, function.attrs
                )
        return ir_mod


def _once(binding: relax.Binding, shapes: dict[str, relax.Var]) -> relax.Binding:
    """Make the variable of a repeated shape another name for the first one."""
    operator = getattr(binding.value, "op", None)
    if not isinstance(operator, relax.ExternFunc) or operator.global_symbol != _MAKE_SHAPE:
        return binding
    made = shapes.setdefault(str(list(binding.value.args[1:])), binding.var)
    return binding if made.same_as(binding.var) else relax.VarBinding(binding.var, made)


def _is_check(binding: relax.Binding) -> bool:
    operator = getattr(binding.value, "op", None)
    if not isinstance(operator, relax.ExternFunc) or operator.global_symbol not in CHECKS:
        return False
    return operator.global_symbol != _MATCH_SHAPE or not _stores(binding.value)


def _stores(match: relax.Call) -> bool:
    """Whether a call of ``match_shape`` stores the extent of an axis for later use."""
    # The tensor, where to store, the number of axes, a code and an operand for each, and an error.
    *each, _ = match.args[3:]
    return any(int(code) == _STORE for code in each[::2])
