from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class SquareRoots(PyExprMutator):
    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.wanted = tvm.ir.Op.get("relax.sqrt")

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        return relax.op.abs(call.args[0]) if call.op == self.wanted else call


@compiler_pass
class OnlyMain:
    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        return tvm.IRModule({"main": ir_mod["main"]})


@compiler_pass
class MarkKernels:
    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        marked = function.with_attr("marked", "yes")
        assert isinstance(marked, tirx.PrimFunc)
        return marked


def program() -> tvm.IRModule:
    """The functions ``main`` and ``pack``, and a kernel that ``main`` calls."""
    builder = relax.BlockBuilder()
    for name in ("main", "pack"):
        x = relax.Var("x", relax.TensorType([4], "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                root = builder.emit(relax.op.sqrt(x))
                root = builder.emit(relax.op.nn.relu(root)) if name == "main" else root
                result = builder.emit_output(root)
            builder.emit_func_output(result)
    with tvm.target.Target("llvm"):
        return relax.transform.LegalizeOps(skip_ops=["relax.sqrt"])(builder.get())


def operators(ir_mod: tvm.IRModule, name: str) -> set[str]:
    values = [b.value for block in ir_mod[name].body.blocks for b in block.bindings]
    return {value.op.name for value in values if isinstance(value, relax.Call)}


def test_mutator_rewrites_only_main_and_pack() -> None:
    before = program()
    after = SquareRoots()(before)
    assert operators(after, "main") == {"relax.abs", "relax.call_tir"}
    assert operators(after, "pack") == {"relax.abs"}
    tvm.ir.assert_structural_equal(after["relu"], before["relu"])


def test_whole_module_is_rewritten() -> None:
    assert [v.name_hint for v in OnlyMain()(program()).functions] == ["main"]


def test_mutator_marks_matching_kernels_only() -> None:
    after = MarkKernels()(program())
    marked = [v.name_hint for v, f in after.functions_items() if "marked" in (f.attrs or {})]
    assert marked == ["relu"]


def test_passes_have_the_names_of_their_classes() -> None:
    passes = SquareRoots(), OnlyMain(), MarkKernels()
    assert [made.info.name for made in passes] == ["SquareRoots", "OnlyMain", "MarkKernels"]
