"""Calls of functions of floats, such as an exponential, become calls of our own (`intrinsics`)."""

from __future__ import annotations

from functools import cache

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Op

from tvmify.compiler import intrinsics
from tvmify.compiler.codegen import llvm
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class CallFunctions:
    """Define the functions of floats that a kernel calls, for the target whose scope is open."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        definitions = llvm.Definitions()

        def called(call: Call) -> Expr:
            name = call.op.name if isinstance(call.op, Op) else ""
            if name not in intrinsics.FUNCTIONS:
                return call
            dtype = str(call.ty.dtype)
            if dtype.startswith("float16"):  # by float32, which has more digits than needed
                wide = dtype.replace("16", "32", 1)
                return defined(name, wide, [x.astype(wide) for x in call.args]).astype(dtype)
            if intrinsics.has(name, dtype):
                return defined(name, dtype, list(call.args))
            return _lane_by_lane(call) if "x" in dtype else call

        @cache  # an unrolled loop calls the same one many times
        def definition(operator: str, dtype: str, count: int) -> tuple[str, str]:
            name = f"tvmify_{operator.rpartition('.')[2]}_{dtype}"
            parameters = [tirx.Var(f"x{i}", dtype) for i in range(count)]
            return name, llvm.define(name, parameters, intrinsics.lowered(operator, parameters))

        def defined(operator: str, dtype: str, operands: list[Expr]) -> Expr:
            name, text = definition(operator, dtype, len(operands))
            return definitions.call(dtype, name, operands, text)

        body = tvm_ffi.structural_map(function.body, [(Call, called)])
        return definitions.added_to(function, body)


def _lane_by_lane(call: Call) -> Expr:
    """Split a vector into elements, since not all of TVM's own rules take vectors."""
    kind, _, lanes = str(call.ty.dtype).partition("x")
    scalars = [
        tirx.call_intrin(kind, call.op, *(tirx.Shuffle([a], [i]) for a in call.args))
        for i in range(int(lanes))
    ]
    return tirx.Shuffle(scalars, list(range(int(lanes))))
