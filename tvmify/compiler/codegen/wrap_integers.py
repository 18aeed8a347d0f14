"""Integers of a program that overflow wrap around, as in eager.

TVM simplifies sums, differences and products as if integers had no largest value, and tells LLVM
that they do not overflow (``nsw``). So ``x + 1 > x`` becomes True, and TVM turns the hash
``x * 1000003 % 5000`` into ``x * 3 % 5000``. That is right for indices, but not for data.
"""

from __future__ import annotations

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, Expr, Op, StringImm, TensorLoad, register_op_attr

from tvmify.compiler.passes.compiler_pass import compiler_pass

#: How the names of our own operators begin.
_PREFIX = "tvmify.wrapping_"
#: What our operators compute, and how their names end, which are LLVM's names.
_OPERATIONS = {tirx.Add: "add", tirx.Sub: "sub", tirx.Mul: "mul"}
#: Attribute of a function that has such operators.
_WRAPS = "tvmify.wraps"
#: TVM's CallEffectKind of functions without effects.
_PURE = 1
#: An operation in LLVM's notation: without ``nsw``.
_LLVM = """\
define linkonce_odr {type} @{name}({type} %a, {type} %b) alwaysinline {{
  %r = {operation} {type} %a, %b
  ret {type} %r
}}
"""


@compiler_pass
class WrapIntegers:
    """Turn operations on integers that depend on data into operators that TVM does not simplify.

    Runs before any simplification. Data are the elements of tensors.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        body = tvm_ffi.structural_map(function.body, (tuple(_OPERATIONS), _wrapping))
        if body.same_as(function.body):
            return function
        return function.with_body(body).with_attr(_WRAPS, True)


@compiler_pass
class UnwrapIntegers:
    """Call functions of LLVM for these operators, after all simplifications."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if _WRAPS not in function.attrs:
            return function
        definitions: dict[str, str] = {}

        def called(call: Call) -> Call:
            if not isinstance(call.op, Op) or not call.op.name.startswith(_PREFIX):
                return call
            operation, dtype = call.op.name.removeprefix(_PREFIX), str(call.ty.dtype)
            name = f"tvmify_{operation}_{dtype}"
            definitions[name] = _LLVM.format(name=name, operation=operation, type=_llvm_type(dtype))
            return tirx.call_pure_extern(dtype, name, *call.args)

        body = tvm_ffi.structural_map(function.body, (Call, called))
        text = StringImm("".join(definitions.values()))
        return function.with_body(
            tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body)
        )


def _wrapping(node: tirx.Add | tirx.Sub | tirx.Mul) -> Expr:
    dtype = str(node.ty.dtype)
    if "int" not in dtype or not _has_data(node):
        return node
    low, high = int(tirx.min_value(dtype)), int(tirx.max_value(dtype))
    if dtype == "int64":  # TVM calls the largest number and its negative infinite
        low, high = low + 2, high - 1
    bound = sym.Analyzer().const_int_bound(node)
    if low <= bound.min_value and bound.max_value <= high:
        return node
    return tirx.call_intrin(dtype, f"{_PREFIX}{_OPERATIONS[type(node)]}", node.a, node.b)


def _has_data(node: Expr) -> bool:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(node, (TensorLoad, found.append))
    return bool(found)


def _llvm_type(dtype: str) -> str:
    kind, _, lanes = dtype.partition("x")
    scalar = f"i{kind.partition('int')[2]}"
    return f"<{lanes} x {scalar}>" if lanes else scalar


for _operation in _OPERATIONS.values():
    register_op_attr(f"{_PREFIX}{_operation}", "TCallEffectKind", _PURE)
    register_op_attr(f"{_PREFIX}{_operation}", "TScriptPrinterName", f"wrapping_{_operation}")
    register_op_attr(f"{_PREFIX}{_operation}", "TVectorizable", True)
