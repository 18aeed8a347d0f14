"""Join 1×1 convolutions and the depthwise convolutions of their results, see the kernel's file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tvm
from tvm import relax

from tvmify.compiler.schedule.expanded_depthwise import ExpandedDepthwise
from tvmify.compiler.schedule.microarchitecture import Microarchitecture

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="JoinDepthwise")
class JoinDepthwise:
    """Replace two calls of fused functions by one, where the first has no other reader."""

    def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
        """Rewrite ``main``."""
        main = ir_mod["main"]
        joining = _Joining(ir_mod)
        blocks = [type(block)(joining.rewrite(block.bindings)) for block in main.body.blocks]
        if not any(joining.joined.values()):
            return ir_mod
        ir_mod = joining.builder.get()
        ir_mod["main"] = relax.Function(
            main.params, relax.SeqExpr(blocks, main.body.body), main.ret_ty, True, main.attrs
        )
        return ir_mod


class _Joining:
    """Rewrites bindings; functions that are joined twice become one."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        self.ir_mod = ir_mod
        self.builder = relax.BlockBuilder(ir_mod)
        self.machine = Microarchitecture.current()
        self.joined: dict[tuple[tvm.ir.GlobalVar, tvm.ir.GlobalVar], tvm.ir.GlobalVar | None] = {}
        self.readers: Counter[relax.Var] = Counter()
        relax.analysis.post_order_visit(ir_mod["main"], self._count)

    def _count(self, node: object) -> None:
        parts = {relax.Call: "args", relax.Tuple: "fields"}.get(type(node))
        if parts is not None:
            self.readers.update(x for x in getattr(node, parts) if isinstance(x, relax.Var))

    def rewrite(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        """Rewrite one block of them."""
        calls = {b.var: b for b in bindings if _is_call(b.value)}
        kept = dict.fromkeys(bindings)
        for binding in calls.values():
            function, operands = binding.value.args
            first = calls.get(operands.fields[0]) if operands.fields else None
            if first is None or self.readers[first.var] > 1:
                continue
            before, others = first.value.args
            joined = self.join(before, function)
            if joined is not None:
                both = [*others.fields, *operands.fields[1:]]
                call = relax.call_tir(joined, both, binding.value.ty_args[0])
                del kept[first]
                kept[binding] = relax.VarBinding(binding.var, call)
        return [replaced or binding for binding, replaced in kept.items()]

    def join(self, first: tvm.ir.GlobalVar, second: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar | None:
        """Add the function that does the work of two."""
        key = first, second
        if key not in self.joined:
            functions = [self.ir_mod[variable] for variable in key]
            both = ExpandedDepthwise.of(*functions, self.machine)
            name = "_".join(variable.name_hint for variable in key)
            self.joined[key] = both and self.builder.add_func(both.function(), name)
        return self.joined[key]


def _is_call(value: relax.Expr) -> bool:
    return (
        isinstance(value, relax.Call)
        and value.op == _CALL_TIR
        and len(value.args) == 2
        and isinstance(value.ty_args[0], relax.TensorType)
    )
