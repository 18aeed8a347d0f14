"""Products of bfloat16: two steps of the reduction at a time, two bytes per weight. Two neighbours
in a row form one word of 32 bits, and so do the two weights that they are multiplied with.
``vdpbf16ps`` of AVX-512 BF16 adds two products to each of 16 float32 sums, in the time of one
float32 multiply-add (measured on Zen 4). Rows are read directly; weights are packed as words.
Without that instruction, bfloat16 weights are used for few rows only, which are bound by memory: a
shift or AND turns a bfloat16 into a float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import relax, tirx
from tvm.ir import Call, Expr, Op, register_op_attr
from tvm.target import Target
from tvm.tirx import Stmt
from tvm.tirx.op import register_intrin_lowering

from tvmify.compiler.costs import COMPACT
from tvmify.compiler.kernels.common.legalizing import values_of
from tvmify.compiler.kernels.common.rewriting import rewrite_body
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.kernels.elementwise import reshape
from tvmify.compiler.microarchitecture import Microarchitecture

#: Our own operator: a sum, and two words, whose numbers are multiplied and added to it.
ADD_DOT = "tvmify.add_dot"
#: Our own operator that packs two numbers into a word.
_WORD = "tvmify.pair"
#: The dtype of such products for the choice of kernels.
KIND = "pairs"
#: Attribute of a function with such a product.
PAIRS = "tvmify.pairs"
#: Operators that move numbers without changing them.
_MOVES = frozenset(
    Op.get(f"relax.{name}")
    for name in ("broadcast_to", "concat", "expand_dims", "permute_dims", "reshape", "squeeze")
)
_ASTYPE, _RESHAPE = Op.get("relax.astype"), Op.get("relax.reshape")
_LOW, _HIGH = 0xFFFF, -0x10000
#: The instruction in LLVM's notation, for a number of sums. TVM has no vectors of bfloat16.
_LLVM = """\
declare <{lanes} x float> @llvm.x86.avx512bf16.dpbf16ps.{bits}(\
    <{lanes} x float>, <{pairs} x bfloat>, <{pairs} x bfloat>)
define linkonce_odr <{lanes} x float> @{name}(
    <{lanes} x float> %sums, <{lanes} x i32> %a, <{lanes} x i32> %b) alwaysinline {{
  %x = bitcast <{lanes} x i32> %a to <{pairs} x bfloat>
  %y = bitcast <{lanes} x i32> %b to <{pairs} x bfloat>
  %r = call <{lanes} x float> @llvm.x86.avx512bf16.dpbf16ps.{bits}(
      <{lanes} x float> %sums, <{pairs} x bfloat> %x, <{pairs} x bfloat> %y)
  ret <{lanes} x float> %r
}}
"""
_WIDTHS = (4, 8, 16)
#: TVM's CallEffectKind of functions without effects.
_PURE = 1


def rows_of(
    builder: relax.BlockBuilder,
    left: Expr,
    rights: Sequence[Expr],
    rows: int,
    machine: Microarchitecture,
) -> Expr | None:
    """Return the left-hand side of products in bfloat16, if they are computed in pairs.

    They can be if their float32 operands were cast from bfloat16.

    Parameters
    ----------
    rights
        The right-hand sides, weights of one shape.
    rows
        The number of rows that are multiplied by each weight.
    """
    values = values_of(builder)
    value = values.get(left)
    if is_moved := _is(value, _RESHAPE):  # the permutations before and after a cast, combined
        value = values.get(value.args[0])
    distant = not machine.keeps(2 * prod(int(size) for size in rights[0].ty.shape))
    few = rows <= machine.lanes() // COMPACT.few_unpacked
    if not (machine.multiplies_pairs or (few and distant)):
        return None
    if not _is(value, _ASTYPE) or not _is_narrow(value.args[0]):
        return None
    if not all(was_narrow(right, values) for right in rights):
        return None
    if not is_moved:
        return value.args[0]
    moved = builder.normalize(relax.op.reshape(value.args[0], left.ty.shape))
    return builder.emit(reshape.legalize(builder, moved))


def sample_of(left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> Sample:
    """Return the sample that such a product is measured with."""

    def body(builder: relax.BlockBuilder, operands: list[relax.Var]) -> Expr:
        wide = [builder.emit(relax.op.astype(x, "float32")) for x in operands]
        return relax.op.matmul(*wide)

    types = [relax.TensorType(list(shape), "bfloat16") for shape in (left, right)]
    return Sample([*types, relax.TensorType(list(out), "float32")], (False, True), body)


def was_narrow(x: Expr, values: dict[Expr, Expr]) -> bool:
    """Whether all elements of a tensor are bfloat16 values."""
    value = values.get(x, x)
    if isinstance(value, relax.Tuple):
        return all(was_narrow(part, values) for part in value.fields)
    if _is(value, _ASTYPE):
        return _is_narrow(value.args[0])
    moves = isinstance(value, Call) and value.op in _MOVES
    return moves and was_narrow(value.args[0], values)


def _is(value: Expr | None, operator: Op) -> bool:
    return isinstance(value, Call) and value.op == operator


def _is_narrow(x: Expr) -> bool:
    return str(x.ty.dtype) == "bfloat16"


def word(first: Expr, second: Expr) -> Expr:
    """Pack two float32 numbers into one word of two bfloat16, an int32."""
    return tirx.call_intrin("int32", _WORD, first, second)


def _lower_word(call: Call) -> Expr:
    """Lower `_WORD` to operators that LLVM has.

    It rounds numbers to even, and keeps NaN, since TVM removes a cast to bfloat16 and back within a
    function. For numbers that were bfloat16 in memory, LLVM removes the rounding.
    """
    kind = str(call.ty.dtype)

    def const(value: int) -> Expr:
        return tirx.const(value, kind)

    def rounded(bits: Expr) -> Expr:
        nearest = bits + const(0x7FFF) + ((bits >> const(16)) & const(1))
        quiet = tirx.Select((bits & const(_LOW)) != const(0), const(0x400000), const(0))
        is_nan = (bits & const(0x7FFFFFFF)) > const(0x7F800000)
        return tirx.Select(is_nan, bits | quiet, nearest)

    first, second = (tirx.Var(name, kind) for name in ("first", "second"))
    low = (rounded(first) >> const(16)) & const(_LOW)
    result = low | (rounded(second) & const(_HIGH))
    for variable, number in zip((second, first), reversed(list(call.args)), strict=True):
        result = tirx.Let(variable, tirx.reinterpret(kind, number), result)
    return result


def dot(a: Expr, b: Expr) -> Expr:
    """Multiply both numbers of a word by those of another, and add the products, in float32."""
    return tirx.call_intrin("float32", ADD_DOT, tirx.const(0, "float32"), a, b)


def add_in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Merge a sum and the `dot` that is added to it into one operation, after scheduling."""

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.BufferStore):
            return None
        value = stmt.value
        if not isinstance(value, tirx.Add) or not _is(value.b, Op.get(ADD_DOT)):
            return stmt
        added = tirx.call_intrin("float32", ADD_DOT, value.a, *value.b.args[1:])
        return tirx.BufferStore(stmt.buffer, added, stmt.indices)

    changed = rewrite_body(function, visit)
    return function if changed.same_as(function) else changed.with_attr(PAIRS, True)


def lower_sum(call: Call) -> Expr:
    """Lower `ADD_DOT` to operators that LLVM has, for the target whose scope is open."""
    sums, a, b = call.args
    kind = str(call.ty.dtype)
    lanes = int(kind.partition("x")[2] or 1)
    machine = Microarchitecture.of(Target.current(allow_none=False))
    if machine.multiplies_pairs and lanes in _WIDTHS:
        return tirx.call_pure_extern(kind, _name(lanes), sums, a, b)
    integer = kind.replace("float", "int")

    def low(x: Expr) -> Expr:
        return tirx.reinterpret(kind, x << tirx.const(16, integer))

    def high(x: Expr) -> Expr:
        return tirx.reinterpret(kind, x & tirx.const(_HIGH, integer))

    return sums + low(a) * low(b) + high(a) * high(b)


def definitions() -> dict[str, str]:
    """Return the functions that `lower_sum` calls, in LLVM's notation, by name."""
    return {
        _name(lanes): _LLVM.format(name=_name(lanes), lanes=lanes, pairs=2 * lanes, bits=32 * lanes)
        for lanes in _WIDTHS
    }


def _name(lanes: int) -> str:
    return f"tvmify_add_dot_{lanes}"


for _name_of, _lower in ((ADD_DOT, lower_sum), (_WORD, _lower_word)):
    register_op_attr(_name_of, "TCallEffectKind", _PURE)
    register_op_attr(_name_of, "TScriptPrinterName", _name_of.partition(".")[2])
    register_op_attr(_name_of, "TVectorizable", True)
    register_intrin_lowering(_name_of, target="llvm", f=_lower)
