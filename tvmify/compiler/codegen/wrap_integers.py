"""Integers of a program that overflow wrap around, as in eager.

TVM simplifies sums, differences and products as if integers had no largest value, and tells LLVM
that they do not overflow (``nsw``). So ``x + 1 > x`` becomes True, and TVM turns the hash
``x * 1000003 % 5000`` into ``x * 3 % 5000``. That is right for indices, but not for data.

Floored quotients of data are functions of LLVM too, which have their dividend once: TVM writes it
several times, so that code of nested ones grows exponentially.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, Expr, Op, TensorLoad, register_op_attr

from tvmify.compiler.codegen import llvm
from tvmify.compiler.passes.compiler_pass import compiler_pass

#: How the names of our own operators begin.
_PREFIX = "tvmify.wrapping_"
#: What our operators compute, and how their names end, which are LLVM's names.
_OPERATIONS = {tirx.Add: "add", tirx.Sub: "sub", tirx.Mul: "mul"}
#: TVM's CallEffectKind of functions without effects.
_PURE = 1
#: An operation in LLVM's notation: without ``nsw``.
_LLVM = """\
define linkonce_odr {type} @{name}({type} %a, {type} %b) alwaysinline {{
  %r = {operation} {type} %a, %b
  ret {type} %r
}}
"""
#: A quotient is one less, and a remainder one divisor more, if there is a remainder with another
#: sign than the divisor's.
_FLOORED = """\
define linkonce_odr {type} @{name}({type} %a, {type} %b) alwaysinline {{
  %q = sdiv {type} %a, %b
  %r = srem {type} %a, %b
  %signs = xor {type} %r, %b
  %differ = icmp slt {type} %signs, zeroinitializer
  %remains = icmp ne {type} %r, zeroinitializer
  %rounds = and {bool} %differ, %remains
  %less = sext {bool} %rounds to {type}
  %quotient = add {type} %q, %less
  %more = and {type} %less, %b
  %remainder = add {type} %r, %more
  ret {type} %{result}
}}
"""
_RESULTS = {tirx.FloorDiv: "quotient", tirx.FloorMod: "remainder"}


@compiler_pass
class WrapIntegers:
    """Turn operations on integers that depend on data into operators that TVM does not simplify.

    Runs before any simplification. Data are the elements of tensors.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        body = tvm_ffi.structural_map(function.body, (tuple(_OPERATIONS), _wrapping))
        return function if body.same_as(function.body) else function.with_body(body)


@compiler_pass
class UnwrapIntegers:
    """Call functions of LLVM for these operators, after all simplifications."""

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        definitions = llvm.Definitions()

        def called(template: str, what: str, dtype: str, operands: Sequence[Expr]) -> Call:
            name = f"tvmify_{what}_{dtype}"
            kind, bits = llvm.type_of(dtype), llvm.bools_of(dtype)
            text = template.format(name=name, operation=what, result=what, type=kind, bool=bits)
            return definitions.call(dtype, name, operands, text)

        def unwrapped(call: Call) -> Call:
            if not isinstance(call.op, Op) or not call.op.name.startswith(_PREFIX):
                return call
            operation = call.op.name.removeprefix(_PREFIX)
            return called(_LLVM, operation, str(call.ty.dtype), call.args)

        def floored(node: tirx.FloorDiv | tirx.FloorMod) -> Expr:
            if not _is_repeated(node):
                return node
            return called(_FLOORED, _RESULTS[type(node)], str(node.ty.dtype), (node.a, node.b))

        rules = [(Call, unwrapped), (tuple(_RESULTS), floored)]
        body = tvm_ffi.structural_map(function.body, rules)
        return definitions.added_to(function, body)


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


def _is_repeated(node: tirx.FloorDiv | tirx.FloorMod) -> bool:
    """Whether TVM would write a dividend that has data more than once."""
    if not str(node.ty.dtype).startswith("int") or not _has_data(node):
        return False
    divisor = node.b.value if isinstance(node.b, tirx.Broadcast) else node.b
    if isinstance(divisor, tirx.IntImm) and divisor.value > 0:
        is_power = not divisor.value & (divisor.value - 1)  # which is a shift
        return not is_power and sym.Analyzer().const_int_bound(node.a).min_value < 0
    return True


def _has_data(node: Expr) -> bool:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(node, (TensorLoad, found.append))
    return bool(found)


for _operation in _OPERATIONS.values():
    register_op_attr(f"{_PREFIX}{_operation}", "TCallEffectKind", _PURE)
    register_op_attr(f"{_PREFIX}{_operation}", "TScriptPrinterName", f"wrapping_{_operation}")
    register_op_attr(f"{_PREFIX}{_operation}", "TVectorizable", True)
