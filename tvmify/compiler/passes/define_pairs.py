"""Bring along what products of bfloat16 call: functions in LLVM's notation, which are inlined."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import StringImm
from tvm.target import Target

from tvmify.compiler.schedule import pairs
from tvmify.compiler.schedule.microarchitecture import Microarchitecture


@tirx.transform.prim_func_pass(opt_level=0, name="DefinePairs")
class DefinePairs:
    """Define the functions that `pairs.lower_sum` calls, for the target whose scope is open."""

    def transform_function(
        self, function: tirx.PrimFunc, _: tvm.IRModule, __: object
    ) -> tirx.PrimFunc:
        """Rewrite one function."""
        machine = Microarchitecture.of(Target.current(allow_none=False))
        if pairs.PAIRS not in function.attrs or not machine.multiplies_pairs:
            return function
        text = StringImm(pairs.definitions())
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, function.body)
        return function.with_body(body)
