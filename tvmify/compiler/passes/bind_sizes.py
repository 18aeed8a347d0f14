"""Lets kernels infer every size from the shapes of their arguments. Otherwise the virtual machine
passes `b` and `s` as numbers to a kernel of ``[b * s, 768]`` in every call, and no loop of it shows
that its number of rows is a single number. Here the product becomes one symbol of the kernel.
Factors that a kernel needs separately are still passed as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import relax, s_tir, sym, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass

T = TypeVar("T")
_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
#: Factors of sizes that TVM cancels with a divisor.
_FACTORS = (2, 3, 4)
#: The longest tiles whose number TVM may spell by a divisor of the size.
_LONGEST_TILES = 64
_COMPOUND = (tirx.Mul, tirx.Add, tirx.Sub, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


@dataclass
class Bindings:
    """The symbols of a function for the sizes of its caller.

    Attributes
    ----------
    variables
        The function's variables, by symbols of the caller.
    compound
        Compound sizes, and the symbol for each.
    """

    variables: dict[tirx.Var, Expr] = field(default_factory=dict)
    compound: list[tuple[Expr, tirx.Var]] = field(default_factory=list)
    _counts: dict[tirx.Var, dict[str, tuple[Expr, Expr]]] = field(default_factory=dict, repr=False)

    def of(self, shapes: Iterable[Iterable[Any]]) -> Bindings:
        """Add a symbol for each size of some shapes that lacks one; return this object."""
        every = [size for shape in shapes for size in shape if not sizes.is_static(size)]
        every.sort(key=lambda size: len(str(size)))  # those that others consist of come first
        for size in every:
            if isinstance(size, tirx.Var) and size not in self.variables:
                self.variables[size] = tirx.Var(size.name, size.ty)
        for size in every:
            known = set(self.variables).issuperset(sizes.variables_of(size))
            # A multiple of another size is never only a variable, which a kernel could infer.
            if known or self._expressed(size) is not None or self._is_linear(size):
                continue
            if not any(sizes.same(size, one) for one, _ in self.compound):
                self.compound.append((size, sizes.variable_for(size)))
        for size, symbol in self.compound:
            self._solve(size, symbol)
        return self

    def _solve(self, size: Expr, symbol: tirx.Var) -> None:
        """Record a symbol of the caller if a size is that symbol combined with a number."""
        variable, *others = dict.fromkeys(sizes.variables_of(size))
        more = sym.Analyzer().simplify(size - variable)
        if not others and isinstance(more, tirx.IntImm) and variable not in self.variables:
            self.variables[variable] = symbol - int(more)

    def apply(self, node: T) -> T:
        """Express something in the caller's sizes by the function's symbols."""

        def replaced(part: Expr) -> Expr:
            found = self._expressed(part) if "int" in str(part.ty.dtype) else None
            return part if found is None else found

        def renamed(part: tirx.Var) -> Expr:
            return self.variables[part] if part in self.variables else replaced(part)

        if self.compound:
            node = tvm_ffi.structural_map(node, [(_COMPOUND, replaced)], order="pre")
        return tvm_ffi.structural_map(node, [(tirx.Var, renamed)])

    def _is_linear(self, size: Expr) -> bool:
        """Whether a size is a multiple of one that has a symbol, and a number.

        TVM spells what is computed from `n` and `2 n - 1` by either: tiles of the one may be as
        many as tiles of the other.
        """
        own = sym.Analyzer().simplify(self.apply(size))
        return any(
            bool(parts := sym.detect_linear_equation(own, [symbol])) and sizes.is_static(*parts)
            for _, symbol in self.compound
        )

    def _expressed(self, part: Expr) -> Expr | None:
        """Express a size by the symbol of a compound one; None if it is made of none of them."""
        for as_part in (_in_place_of, _quotient_in_place_of):
            for size, symbol in self.compound:
                found = as_part(part, size, symbol)
                if found is not None:
                    return found
        if isinstance(part, tirx.FloorDiv) and sizes.is_static(part.b):
            for size, symbol in self.compound:
                if symbol not in self._counts:
                    self._counts[symbol] = _counts_of_tiles(size, symbol)
                spelt, count = self._counts[symbol].get(str(part), (None, None))
                if spelt is not None and tvm_ffi.structural_equal(part, spelt):
                    return count
        return None

    def apply_to_type(self, ty: relax.Type) -> relax.Type:
        """Express the type of one or several tensors by the function's symbols.

        Sizes are simplified, since FuseTIR compares them by their text.
        """
        if isinstance(ty, relax.TupleType):
            return relax.TupleType([self.apply_to_type(part) for part in ty.fields])
        if sizes.is_static(*ty.shape.values):
            return ty
        shape = [sizes.simplified(self.apply(size)) for size in ty.shape.values]
        return relax.TensorType(shape, str(ty.dtype))


def symbols_in(node: Any) -> list[tirx.Var]:
    """Return the variables that something contains, by name."""
    found: dict[tirx.Var, None] = {}

    def note(variable: tirx.Var) -> None:
        if str(getattr(variable.ty, "dtype", "")) == "int64" and not hasattr(variable.ty, "shape"):
            found[variable] = None

    def look_inside(block: s_tir.SBlock) -> None:
        for buffer in block.alloc_buffers:  # whose shapes the visitor does not enter
            for size in buffer.shape:
                for variable in sizes.variables_of(size):
                    note(variable)

    tvm_ffi.structural_walk(node, [(tirx.Var, note), (s_tir.SBlock, look_inside)])
    return list(found)


@compiler_pass
class BindSizes:
    """Rewrite kernels that take sizes as numbers, and their calls; runs after fusion."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        main = ir_mod["main"]
        binding = _Binding(ir_mod)
        blocks = [
            type(block)([binding.rewritten(one) for one in block.bindings])
            for block in main.body.blocks
        ]
        if not binding.made:
            return ir_mod
        ir_mod = binding.builder.get()
        body = relax.SeqExpr(blocks, main.body.body)
        ir_mod["main"] = relax.Function(main.params, body, main.ret_ty, True, main.attrs)
        return relax.transform.DeadCodeElimination()(ir_mod)


@compiler_pass
class MergeSymbols:
    """Give each symbol of a kernel one variable. Tensor expressions have variables of their own for
    the sizes of arguments, and the program's for those of results; TVM does not know that the two
    are equal, and simplifies no index that has both.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one kernel."""
        every = [v for size in sizes.of_parameters(function) for v in sizes.variables_of(size)]
        first = {variable.name: variable for variable in reversed(every)}
        others: dict[tirx.Var, Expr] = {v: first[v.name] for v in every if v != first[v.name]}
        return Bindings(others).apply(function) if others else function


@compiler_pass
class DropUnused:
    """Remove kernels that became views, if there are symbols, since they have many divisions."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite the module."""
        types = [parameter.ty for parameter in ir_mod["main"].params]
        if all(sizes.is_static(*ty.shape.values) for ty in types):
            return ir_mod
        return relax.transform.DeadCodeElimination()(ir_mod)


class _Binding:
    def __init__(self, ir_mod: tvm.IRModule) -> None:
        self.ir_mod = ir_mod
        self.builder = relax.BlockBuilder(ir_mod)
        #: By kernel and arguments: the new kernel, and the numbers that it still takes.
        self.made: dict[object, tuple[tvm.ir.GlobalVar, list[tirx.Var]]] = {}
        self.rewritten_kernels: set[tvm.ir.GlobalVar] = set()

    def rewritten(self, binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if not isinstance(call, relax.Call) or call.op != _CALL_TIR:
            return binding
        variable, operands = call.args
        function = self.ir_mod[variable]
        tensors = [x for x in operands.fields if isinstance(x.ty, relax.TensorType)]
        numbers = [x for x in operands.fields if not isinstance(x.ty, relax.TensorType)]
        if not numbers:
            return binding
        (out,) = call.ty_args
        results = list(out.fields) if isinstance(out, relax.TupleType) else [out]
        shapes = [list(ty.shape.values) for ty in (*(x.ty for x in tensors), *results)]
        key = variable, str(shapes), str(numbers)
        if key not in self.made:
            kernel, left = _bound(function, numbers, shapes, len(tensors))
            if variable in self.rewritten_kernels:
                variable = self.builder.add_func(kernel, variable.name_hint)
            else:
                self.builder.update_func(variable, kernel)
                self.rewritten_kernels.add(variable)
            self.made[key] = variable, left
        variable, left = self.made[key]
        return relax.VarBinding(
            binding.var,
            relax.Call(_CALL_TIR, [variable, relax.Tuple([*tensors, *left])], call.attrs, [out]),
        )


def _bound(
    function: tirx.PrimFunc, numbers: list[Expr], shapes: list[list[Any]], inputs: int
) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
    """Return a kernel that infers its sizes from its arguments, and the numbers it still takes.

    Parameters
    ----------
    numbers
        The numbers that it takes.
    shapes
        The shapes of its tensors, in the caller's sizes.
    inputs
        How many of these are inputs.
    """
    given = [p for p in function.params if not hasattr(p.ty, "shape")]
    function = function.specialize(dict(zip(given, numbers, strict=True)))
    bindings = Bindings()
    pairs = [
        pair
        for parameter, shape in zip(function.params, shapes, strict=True)
        for pair in zip(parameter.ty.shape, shape, strict=True)
    ]
    for own, size in pairs:
        if not isinstance(own, tirx.Var):
            continue
        bindings.variables[own] = own
        if isinstance(size, tirx.Var):
            bindings.variables.setdefault(size, own)
        elif not sizes.is_static(size):
            bindings.compound.append((size, own))
    bindings.of([own] for own, _ in pairs)
    function = bindings.apply(function)
    bound = {size for p in function.params for size in p.ty.shape if isinstance(size, tirx.Var)}
    wanted = {v for number in numbers for v in sizes.variables_of(number)} - bound
    parts = [function.body, *(size for p in function.params for size in p.ty.shape)]
    left = [v for v in dict.fromkeys(v for part in parts for v in symbols_in(part)) if v in wanted]
    own = {symbol: tirx.Var(symbol.name, symbol.ty) for symbol in left}
    function = Bindings(own).apply(function)
    return _with_numbers(function, list(own.values()), inputs), left


def _with_numbers(function: tirx.PrimFunc, numbers: list[tirx.Var], place: int) -> tirx.PrimFunc:
    parameters = [*function.params[:place], *numbers, *function.params[place:]]
    return tirx.PrimFunc(parameters, function.body, function.ret_type, function.attrs)


def _in_place_of(part: Expr, size: Expr, symbol: tirx.Var) -> Expr | None:
    """Return an expression with a symbol in place of a size.

    None if it is not that size, a multiple or a part of it, or a sum of it and a number.
    """
    is_sum = isinstance(part, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv))
    if is_sum and not isinstance(size, tirx.Var):
        # TVM merges numbers: the last of `s0 * 2 - 4` rows is `s0 * 2 - 5`.
        more = _difference(part, size)
        if more is not None:
            return _shifted(symbol, more)
    if not isinstance(size, tirx.Mul):
        return symbol if tvm_ffi.structural_equal(part, size) else None
    number, rest = _factors(part)
    own_number, own = _factors(size)
    for factor in own:
        place = next((i for i, one in enumerate(rest) if _equal(one, factor)), None)
        if place is None:
            return None
        del rest[place]
    if 0 < number < own_number and own_number % number == 0:
        # As `ceil_div` spells it: TVM writes `s0 * 2` for tiles of 6 of `s0 * 12` rows.
        result = (symbol - 1) // (own_number // number) + 1
    elif number % own_number == 0:
        result = symbol if number == own_number else symbol * (number // own_number)
    else:
        return None
    for factor in rest:
        result = result * factor
    return result


def _quotient_in_place_of(part: Expr, size: Expr, symbol: tirx.Var) -> Expr | None:
    """As `_in_place_of`, if the expression is a quotient of the size, or of the same number.

    TVM joins divisors and cancels factors: tiles of 2 of `(s0 - 3) // 4` rows are
    `(s0 - 7) // 8 + 1`, and tiles of 12 of `s0 * 2 - 1` rows are `(s0 - 1) // 6 + 1`.
    """
    if not isinstance(part, tirx.FloorDiv) or not sizes.is_static(part.b):
        return None
    quotient, more = (size.a, size.b) if isinstance(size, tirx.Add) else (size, 0)
    if isinstance(quotient, tirx.FloorDiv) and sizes.is_static(more, quotient.b):
        divisor, difference = int(quotient.b), _difference(part.a, quotient.a)
        if difference is None or difference % divisor or int(part.b) % divisor:
            return None
        return _shifted(symbol, difference // divisor - int(more)) // (int(part.b) // divisor)
    for factor in _FACTORS:
        difference = _difference(part.a * factor, size)
        if difference is not None:
            # The sum is a multiple of the factor, so less than that may be added. As `ceil_div`
            # spells it: where s0 * 2 + 2 rows are tiles of 12, TVM writes s0 // 6 + 1.
            more = -1 if difference < 0 <= difference + factor else difference
            return _shifted(symbol, more) // (int(part.b) * factor)
    for more in (-1, 0):  # tiles of `(s0 + 1) // 2 * 2 - 1` rows are `(s0 - 1) // 8 + 1`
        spelt = sym.Analyzer().simplify((size + more) // part.b)
        if tvm_ffi.structural_equal(part, spelt):
            return _shifted(symbol, more) // part.b
    return None


def _counts_of_tiles(size: Expr, symbol: tirx.Var) -> dict[str, tuple[Expr, Expr]]:
    """Return how TVM may spell the number of tiles of a size, and that number, by its text.

    TVM joins the divisor of a size with that of its tiles: where `s0 // 16 * 2 + 2` rows are tiles
    of 8, it writes `s0 // 64 + 1`.
    """
    divided: list[Expr] = []
    tvm_ffi.structural_walk(size, [(tirx.FloorDiv, divided.append)])
    found: dict[str, tuple[Expr, Expr]] = {}
    for step in range(2, _LONGEST_TILES + 1) if divided else ():
        for more in (-1, 0):
            spelt, count = sym.Analyzer().simplify((size + more) // step), (symbol + more) // step
            if isinstance(spelt, (tirx.Add, tirx.Sub)) and sizes.is_static(spelt.b):
                number = spelt.b if isinstance(spelt, tirx.Sub) else -int(spelt.b)
                spelt, count = spelt.a, _shifted(count, int(number))
            found.setdefault(str(spelt), (spelt, count))
    return found


def _difference(a: Expr, b: Expr) -> int | None:
    """Return the difference of two expressions if it is a number."""
    found = sym.Analyzer().simplify(a - b)
    return int(found) if isinstance(found, tirx.IntImm) else None


def _shifted(symbol: tirx.Var, more: int) -> Expr:
    return symbol + more if more else symbol


def _factors(size: Expr) -> tuple[int, list[Expr]]:
    """Return the product of the numbers among the factors of a size, and the other factors."""
    if isinstance(size, tirx.IntImm):
        return int(size), []
    if not isinstance(size, tirx.Mul):
        return 1, [size]
    (number, factors), (more, others) = _factors(size.a), _factors(size.b)
    return number * more, [*factors, *others]


def _equal(one: Expr, other: Expr) -> bool:
    return one.same_as(other) or bool(tvm_ffi.structural_equal(one, other))
