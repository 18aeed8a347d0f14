"""Loops keep their extents, which are hidden from all passes but LLVM's."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.tirx.build import codegen_build

from tests.compiler.kernels.kernels import NATIVE
from tvmify.compiler.codegen.hide_extents import HideExtents
from tvmify.compiler.codegen.objects import emit


def counting() -> tvm.IRModule:
    """A function with a loop inside one whose extent is an argument."""
    count, i, j = (tirx.Var(name, "int64") for name in ("count", "i", "j"))
    call = tirx.Evaluate(tirx.call_extern("int32", "tvmify_noted", i * 4 + j))
    serial, zero = tirx.ForKind.SERIAL, tirx.const(0, "int64")
    inner = tirx.For(j, zero, tirx.const(4, "int64"), serial, call)
    outer = tirx.For(i, zero, count, serial, inner)
    function = tirx.PrimFunc([count], outer).with_attr("global_symbol", "counting")
    return tvm.IRModule({"counting": function.with_attr("target", NATIVE)})


def test_only_variables_are_hidden():
    hidden = HideExtents()(counting())["counting"]
    assert not isinstance(hidden.body.extent, tirx.Var)
    tvm.ir.assert_structural_equal(hidden.body.body.extent, tirx.const(4, "int64"))


def test_the_code_is_the_same():
    before, after = (
        emit(codegen_build(ir_mod, NATIVE)) for ir_mod in (counting(), HideExtents()(counting()))
    )
    assert before == after
