"""Copies results that would share memory with an argument, weight, constant or other result. A
result belongs to the caller, who may write to it; results that share memory in eager are handled by
`frontend.sharing`. ``RewriteDataflowReshape``, which runs before, turns every reshape into a view.
"""

from __future__ import annotations

import tvm
from tvm import relax, te
from tvm.ir.expr import GenericConst

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass

_IN_PLACE = tvm.ir.Op.get("relax.call_tir_inplace")


@compiler_pass
class OwnOutputs:
    """Copy the results of ``main`` that are views of memory that something else also owns."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        main = ir_mod["main"]
        values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
        outputs = values[main.body.body].fields
        seen: set[relax.Expr] = set()
        copied = []
        # Tensors that are written in place come last. They are the caller's, and not another
        # result.
        written = {x: i for i, x in enumerate(outputs) if _is_in_place(values.get(x))}
        for position, x in enumerate(outputs):
            root = _root(x, values)
            if written.get(x) == position:
                continue
            is_shared = not _is_computed(root) or _is_in_place(root) or root in seen
            if _has_memory(root) and is_shared:
                copied.append(position)
            seen.add(root)
        if not copied:
            return ir_mod
        builder = relax.BlockBuilder(ir_mod)
        copies = {i: relax.DataflowVar("copy", outputs[i].ty) for i in copied}
        bindings = [relax.VarBinding(copies[i], _call_copy(builder, outputs[i])) for i in copied]
        result = relax.Tuple([copies.get(i, x) for i, x in enumerate(outputs)])
        bindings.append(relax.VarBinding(main.body.body, result))
        blocks = [
            type(block)([b for b in block.bindings if b.var != main.body.body])
            for block in main.body.blocks
        ]
        blocks[-1] = type(blocks[-1])([*blocks[-1].bindings, *bindings])
        ir_mod = builder.get()
        ir_mod["main"] = relax.Function(
            main.params, relax.SeqExpr(blocks, main.body.body), main.ret_ty, True, main.attrs
        )
        return ir_mod


def _call_copy(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    source = te.placeholder(sizes.sizes_of(x.ty.shape), str(x.ty.dtype))
    target = te.compute(source.shape, lambda *i: source[i] if i else source(), name="copy")
    function = builder.add_func(te.create_prim_func([source, target]), "copy")
    return relax.call_tir(function, [x], x.ty)


def _root(expr: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Follow variables and views to the expression that owns the memory."""
    while True:
        value = values.get(expr) if isinstance(expr, relax.Var) else None
        if isinstance(expr, relax.Call) and expr.op == tvm.ir.Op.get("relax.reshape"):
            expr = expr.args[0]
        elif value is not None:
            expr = value
        else:
            return expr


def _is_in_place(value: relax.Expr | None) -> bool:
    return isinstance(value, relax.Call) and value.op == _IN_PLACE


def _has_memory(root: relax.Expr) -> bool:
    return not any(sizes.same(size, 0) for size in root.ty.shape)


def _is_computed(root: relax.Expr) -> bool:
    return not isinstance(root, (relax.Var, GenericConst))
