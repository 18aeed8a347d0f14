"""Functions in LLVM's language, which kernels call in expressions, and which LLVM inlines."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, Op, StringImm
from tvm.target.codegen import llvm_get_intrinsic_name

_KINDS = {"float16": "half", "float32": "float", "float64": "double", "bool": "i1"}
#: What an operation on floats, on integers, and on unsigned integers is called.
_ARITHMETIC = {
    tirx.Add: ("fadd", "add", "add"),
    tirx.Sub: ("fsub", "sub", "sub"),
    tirx.Mul: ("fmul", "mul", "mul"),
    tirx.Div: ("fdiv", "sdiv", "udiv"),
    tirx.Mod: ("frem", "srem", "urem"),
    tirx.BitwiseAnd: ("", "and", "and"),
    tirx.BitwiseOr: ("", "or", "or"),
    tirx.BitwiseXor: ("", "xor", "xor"),
    tirx.And: ("", "and", "and"),
    tirx.Or: ("", "or", "or"),
    tirx.LShift: ("", "shl", "shl"),
    tirx.RShift: ("", "ashr", "lshr"),
}
#: Only "not equal" is true of NaN, as in C.
_COMPARISONS = {
    tirx.EQ: ("fcmp oeq", "icmp eq", "icmp eq"),
    tirx.NE: ("fcmp une", "icmp ne", "icmp ne"),
    tirx.LT: ("fcmp olt", "icmp slt", "icmp ult"),
    tirx.LE: ("fcmp ole", "icmp sle", "icmp ule"),
    tirx.GT: ("fcmp ogt", "icmp sgt", "icmp ugt"),
    tirx.GE: ("fcmp oge", "icmp sge", "icmp uge"),
}
_CHOICES = {tirx.Min: tirx.LT, tirx.Max: tirx.GT}
#: Operators of TVM that are functions of LLVM.
_FUNCTIONS = {"tirx.floor": "llvm.floor", "tirx.sqrt": "llvm.sqrt", "tirx.trunc": "llvm.trunc"}


class Definitions:
    """The functions that a kernel calls."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def call(self, dtype: str, name: str, operands: Sequence[Expr], text: str) -> Call:
        """Call a function, defined by a text, that returns a value of a dtype."""
        self.add(name, text)
        return tirx.call_pure_extern(dtype, name, *operands)

    def add(self, name: str, text: str) -> None:
        """Define a function that the kernel calls already."""
        self._texts[name] = text

    def added_to(self, function: tirx.PrimFunc, body: Any) -> tirx.PrimFunc:
        """Return the kernel with another body, and the functions that it calls."""
        if not self._texts:
            return function
        lines = [line for text in self._texts.values() for line in text.splitlines()]
        declared = dict.fromkeys(line for line in lines if line.startswith("declare "))  # only once
        lines = [*declared, *(line for line in lines if line not in declared)]
        text = StringImm("\n".join(lines) + "\n")
        imported = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body)
        return function.with_body(imported)


def type_of(dtype: str) -> str:
    """Return LLVM's name for a dtype of TVM, such as ``<8 x float>`` for ``float32x8``."""
    kind, _, lanes = dtype.partition("x")
    scalar = _KINDS.get(kind) or f"i{kind.partition('int')[2]}"
    return f"<{lanes} x {scalar}>" if lanes else scalar


def bools_of(dtype: str) -> str:
    """Return LLVM's name for a condition for each lane of a value."""
    lanes = dtype.partition("x")[2]
    return f"<{lanes} x i1>" if lanes else "i1"


def define(name: str, parameters: Sequence[tirx.Var], result: Expr) -> str:
    """Return a function that computes an expression of its parameters, and is always inlined.

    To TVM's code generator, bound values (``tirx.Let``) are what they are bound to: it writes out
    each in those after it to analyse them, which takes minutes where such functions are nested.

    Raises
    ------
    NotImplementedError
        The expression has a node that this module does not know.
    """
    return _Function(parameters).text(name, result)


class _Function:
    def __init__(self, parameters: Sequence[tirx.Var]) -> None:
        self._parameters = parameters
        self._values = {variable: f"%p{i}" for i, variable in enumerate(parameters)}
        self._lines = ["entry:"]
        self._block = "entry"
        self._count = 0
        self._declarations: dict[str, None] = {}

    def text(self, name: str, result: Expr) -> str:
        value, kind = self._value(result), type_of(_dtype(result))
        given = ", ".join(f"{type_of(_dtype(p))} {self._values[p]}" for p in self._parameters)
        head = f"define linkonce_odr {kind} @{name}({given}) alwaysinline {{"
        lines = [*self._declarations, head, *self._lines, f"  ret {kind} {value}", "}"]
        return "\n".join(lines) + "\n"

    def _emit(self, instruction: str) -> str:
        self._count += 1
        self._lines.append(f"  %v{self._count} = {instruction}")
        return f"%v{self._count}"

    def _value(self, node: Expr) -> str:
        """Emit what an expression needs, and return the operand that holds its value."""
        while isinstance(node, tirx.Let):
            self._values[node.var] = self._value(node.value)
            node = node.body
        if isinstance(node, tirx.Var):
            return self._values[node]
        if isinstance(node, tirx.IntImm | tirx.FloatImm):
            return _constant(node)
        emit = _EMIT.get(type(node))
        if emit is None:
            raise NotImplementedError(f"a function of LLVM with {type(node).__name__}")
        return emit(self, node)

    def _operands(self, *nodes: Expr) -> str:
        """Return operands of one type, after that type."""
        return f"{type_of(_dtype(nodes[0]))} {', '.join(self._value(node) for node in nodes)}"

    def _arithmetic(self, node: Any) -> str:
        name = _name(_ARITHMETIC[type(node)], _dtype(node))
        return self._emit(f"{name} {self._operands(node.a, node.b)}")

    def _comparison(self, node: Any) -> str:
        name = _name(_COMPARISONS[type(node)], _dtype(node.a))
        return self._emit(f"{name} {self._operands(node.a, node.b)}")

    def _choice(self, node: Any) -> str:
        kind = type_of(_dtype(node))
        a, b = self._value(node.a), self._value(node.b)
        compare = _name(_COMPARISONS[_CHOICES[type(node)]], _dtype(node))
        first = self._emit(f"{compare} {kind} {a}, {b}")
        flags = bools_of(_dtype(node))
        return self._emit(f"select {flags} {first}, {kind} {a}, {kind} {b}")

    def _select(self, node: tirx.Select) -> str:
        chosen, otherwise = self._operands(node.true_value), self._operands(node.false_value)
        return self._emit(f"select {self._operands(node.condition)}, {chosen}, {otherwise}")

    def _cast(self, node: tirx.Cast) -> str:
        before, after = _dtype(node.value), _dtype(node)
        instruction = _conversion(before, after)
        if not instruction:
            return self._value(node.value)
        return self._emit(f"{instruction} {self._operands(node.value)} to {type_of(after)}")

    def _broadcast(self, node: tirx.Broadcast) -> str:
        kind = type_of(_dtype(node))
        lanes = kind.partition(" ")[0].removeprefix("<")
        if isinstance(node.value, tirx.IntImm | tirx.FloatImm):
            element = f"{type_of(_dtype(node.value))} {_constant(node.value)}"
            return f"<{', '.join([element] * int(lanes))}>"
        first = self._emit(f"insertelement {kind} poison, {self._operands(node.value)}, i32 0")
        return self._emit(
            f"shufflevector {kind} {first}, {kind} poison, <{lanes} x i32> zeroinitializer"
        )

    def _call(self, node: Call) -> str:
        name = node.op.name if isinstance(node.op, Op) else ""
        if name == "tirx.reinterpret":
            return self._bits(node)
        if name == "prim.if_then_else":
            return self._branch(*node.args)
        if name == "tirx.isnan":
            value = self._value(node.args[0])
            return self._emit(f"fcmp uno {type_of(_dtype(node.args[0]))} {value}, {value}")
        if name == "tirx.call_llvm_pure_intrin":
            return self._function(llvm_get_intrinsic_name(node.args[0].value), node, node.args[1:])
        if name in _FUNCTIONS:
            return self._function(_FUNCTIONS[name], node, node.args)
        raise NotImplementedError(f"a function of LLVM that calls {name or node.op}")

    def _bits(self, node: Call) -> str:
        before, after = type_of(_dtype(node.args[0])), type_of(_dtype(node))
        value = self._value(node.args[0])
        return value if before == after else self._emit(f"bitcast {before} {value} to {after}")

    def _function(self, name: str, node: Call, arguments: Sequence[Expr]) -> str:
        result = type_of(_dtype(node))
        kinds = [type_of(_dtype(argument)) for argument in arguments]
        # The types that a name of LLVM's stands for are a part of it.
        overloaded = {"llvm.ldexp": [result, *kinds[1:]], "llvm.vector.reduce.or": kinds}
        name = ".".join([name, *map(_suffix, overloaded.get(name, [result]))])
        self._declarations[f"declare {result} @{name}({', '.join(kinds)})"] = None
        operands = ", ".join(self._operands(argument) for argument in arguments)
        return self._emit(f"call {result} @{name}({operands})")

    def _branch(self, condition: Expr, then: Expr, otherwise: Expr) -> str:
        flag = self._value(condition)
        self._count += 1
        number, kind = self._count, type_of(_dtype(then))
        self._lines.append(f"  br i1 {flag}, label %then{number}, label %else{number}")
        ends = []
        for label, value in ((f"then{number}", then), (f"else{number}", otherwise)):
            self._open(label)
            ends.append(f"[ {self._value(value)}, %{self._block} ]")
            self._lines.append(f"  br label %end{number}")
        self._open(f"end{number}")
        return self._emit(f"phi {kind} {', '.join(ends)}")

    def _open(self, block: str) -> None:
        self._block = block
        self._lines.append(f"{block}:")


_EMIT: dict[type, Callable[[_Function, Any], str]] = {
    **dict.fromkeys(_ARITHMETIC, _Function._arithmetic),
    **dict.fromkeys(_COMPARISONS, _Function._comparison),
    **dict.fromkeys(_CHOICES, _Function._choice),
    tirx.Select: _Function._select,
    tirx.Cast: _Function._cast,
    tirx.Broadcast: _Function._broadcast,
    Call: _Function._call,
}


def _dtype(node: Expr) -> str:
    return str(node.ty.dtype)


def _name(names: tuple[str, str, str], dtype: str) -> str:
    """Return the name of an operation for a dtype."""
    return names[0 if dtype.startswith("float") else 2 if dtype.startswith(("uint", "bool")) else 1]


def _constant(node: tirx.IntImm | tirx.FloatImm) -> str:
    if isinstance(node, tirx.IntImm):
        return str(int(node.value))
    # LLVM writes floats of all types by the bits of a float64 that the type has.
    rounded = np.dtype(_dtype(node)).type(node.value)
    return f"0x{struct.pack('>d', rounded).hex().upper()}"


def _suffix(kind: str) -> str:
    """Return a type as a part of a name, such as ``v8f32`` for ``<8 x float>``."""
    lanes, _, scalar = kind.strip("<>").rpartition(" x ")
    scalar = {"half": "f16", "float": "f32", "double": "f64"}.get(scalar, scalar)
    return f"v{lanes}{scalar}" if lanes else scalar


def _conversion(before: str, after: str) -> str:
    """Return the instruction that converts between dtypes; nothing if their bits are equal."""
    source, target = (dtype.partition("x")[0] for dtype in (before, after))
    from_float, to_float = source.startswith("float"), target.startswith("float")
    unsigned = source.startswith(("uint", "bool"))
    width, other = _width(source), _width(target)
    if from_float and to_float:
        return "" if width == other else "fpext" if width < other else "fptrunc"
    if from_float:
        return "fptoui" if target.startswith("uint") else "fptosi"
    if to_float:
        return "uitofp" if unsigned else "sitofp"
    return "" if width == other else "trunc" if width > other else "zext" if unsigned else "sext"


def _width(kind: str) -> int:
    return 1 if kind == "bool" else 8 * np.dtype(kind).itemsize
