"""Torch's symbols of a recorded program as the `Shapes` that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from math import frexp, lcm
from typing import TYPE_CHECKING, Any

import sympy
import torch
from sympy.logic import boolalg
from torch.export.graph_signature import InputKind
from torch.utils._sympy import functions

from tvmify.artifact.expressions import Condition, Size, Term, renamed, symbols_of
from tvmify.artifact.shapes import Axis, Shapes, Symbol, canonical_names
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.symbols import identity_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: The largest size, and the largest number of elements: compiled code has 32-bit indices.
LARGEST = 2**31 - 1

_TERMS: dict[type, str] = {
    sympy.Add: "+",
    sympy.Mul: "*",
    functions.FloorDiv: "//",
    functions.CleanDiv: "//",
    functions.Mod: "%",
    functions.PythonMod: "%",
    functions.Max: "max",
    functions.Min: "min",
    sympy.Max: "max",
    sympy.Min: "min",
}
_CONDITIONS: dict[type, tuple[str, bool]] = {  # and whether the operands change places
    sympy.Eq: ("==", False),
    sympy.Ne: ("!=", False),
    sympy.StrictLessThan: ("<", False),
    sympy.LessThan: ("<=", False),
    sympy.StrictGreaterThan: ("<", True),
    sympy.GreaterThan: ("<=", True),
}
_JOINED: dict[type, str] = {boolalg.And: "and", boolalg.Or: "or", boolalg.Not: "not"}


def recorded_shapes(program: ExportedProgram, hints: Mapping[Axis, int]) -> Shapes | None:
    """Return what a program serves, as far as its recording and its translation have found.

    Parameters
    ----------
    program
        What was found is asked of the environment of its symbols, so later calls may find more.
    hints
        The values to tune for, by axis; others are what the recorded call had.

    Returns
    -------
    shapes
        None if no size is symbolic.

    Raises
    ------
    UnsupportedOperator
        A size or a guard cannot be expressed.
    """
    environment = _environment(program)
    if environment is None:
        return None
    leaves = _leaves(program)
    sizes = {leaf: tuple(map(_size, shape)) for leaf, shape in leaves.items()}
    alone = {size for shape in leaves.values() for size in shape if isinstance(size, sympy.Symbol)}
    if not alone:
        return None
    symbols, chosen = [], {}
    for symbol in alone:
        lower, upper = _range(environment, symbol)
        symbols.append(Symbol(str(symbol), lower, upper))
        axis = next(
            Axis(leaf, number)
            for leaf, shape in leaves.items()
            for number, size in enumerate(shape)
            if size == symbol
        )
        hint = hints.get(axis, int(environment.backed_var_to_val[symbol]))
        chosen[str(symbol)] = min(max(hint, lower), upper)
    guards = [*_guards(environment), *_element_counts(program)]
    try:
        return Shapes.canonical(symbols, sizes, guards, chosen)
    except ValueError as error:
        raise UnsupportedOperator(
            ["aten.sym_size.int"], f"its sizes cannot be expressed: {error}"
        ) from error


def symbol_names(program: ExportedProgram) -> dict[str, str]:
    """Return the name in `Shapes` of each of torch's symbols that stands alone as a size."""
    leaves = _leaves(program)
    return canonical_names({leaf: tuple(map(_size, shape)) for leaf, shape in leaves.items()})


def assumptions(program: ExportedProgram) -> list[str]:
    """Describe what a recording assumes about its sizes, in torch's names of symbols. Code that
    raises an error for some sizes records no operator for that.
    """
    environment = _environment(program)
    if environment is None:
        return []
    found = {
        f"{size} in {environment.var_to_range[size]}"
        for shape in _leaves(program).values()
        for size in shape
        if isinstance(size, sympy.Symbol)
    }
    guards = (guard.expr.xreplace(environment.replacements) for guard in environment.guards)
    return sorted(found | {str(guard) for guard in guards if guard != sympy.true})


def equal_sizes(program: ExportedProgram) -> dict[sympy.Basic, sympy.Basic]:
    """Return, for each size that a guard equates with a simpler one, the simpler one."""
    environment = _environment(program)
    if environment is None:
        return {}
    guards = (guard.expr.xreplace(environment.replacements) for guard in environment.guards)
    pairs = (sorted(g.args, key=_complexity) for g in guards if isinstance(g, sympy.Eq))
    return {other: simple for simple, other in pairs if not other.is_Integer}


def size_of(value: int | torch.SymInt, names: Mapping[str, str]) -> Size:
    """Return a size, a stride or an offset of a tensor of a program.

    Parameters
    ----------
    names
        See `symbol_names`.

    Raises
    ------
    UnsupportedOperator
        It cannot be expressed.
    """
    return size_of_expression(identity_of(value), names)


def size_of_expression(expression: Any, names: Mapping[str, str]) -> Size:
    """Return an expression of torch's symbols as an artifact holds it; as `size_of`."""
    return renamed(_size(expression), names)


def with_later_guards(shapes: Shapes, program: ExportedProgram) -> Shapes:
    """Return the shapes that a program serves after its decomposition or translation, which may
    have added guards.

    Where this has made a symbol a number, a guard says so. Where it has made two of them one, or
    others have other names now, the sizes are those of now.

    Raises
    ------
    UnsupportedOperator
        No symbol is left.
    """
    later = recorded_shapes(program, {})
    if later is None:
        raise UnsupportedOperator(["aten.sym_size.int"], "a symbolic size became a constant")
    pairs = list(_paired(shapes, later))
    if any(a != b for a, b in pairs if isinstance(a, str) and isinstance(b, str)):
        return _narrowed(shapes, later, dict(reversed(pairs)))
    equal = (Condition("==", pair) for pair in pairs if pair[0] != pair[1])
    guards = {str(guard): guard for guard in (*shapes.guards, *later.guards, *equal)}
    ordered = tuple(guard for _, guard in sorted(guards.items()))
    return Shapes(shapes.symbols, shapes.leaves, ordered, shapes.hints)


def _narrowed(shapes: Shapes, later: Shapes, became: Mapping[Any, Size]) -> Shapes:
    """Return the sizes of `later` with the guards, ranges and hints of both."""
    given = {symbol.name: symbol for symbol in later.symbols}
    hints = dict(zip(given, later.hints, strict=True))
    for symbol, hint in reversed(list(zip(shapes.symbols, shapes.hints, strict=True))):
        name = became[symbol.name]
        if isinstance(name, str):
            lower, upper = given[name].lower, given[name].upper
            given[name] = Symbol(name, max(symbol.lower, lower), min(symbol.upper, upper))
            hints[name] = hint
    for name, symbol in given.items():
        hints[name] = min(max(hints[name], symbol.lower), symbol.upper)
    guards = [*later.guards, *(renamed(guard, became) for guard in shapes.guards)]
    return Shapes.canonical(given.values(), later.leaves, filter(symbols_of, guards), hints)


def _paired(before: Shapes, after: Shapes) -> Iterator[tuple[Size, Size]]:
    for leaf, shape in before.leaves.items():
        yield from zip(shape, after.leaves[leaf], strict=True)


def _environment(program: ExportedProgram) -> Any:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _leaves(program: ExportedProgram) -> dict[int, tuple[Any, ...]]:
    """Return the sizes of each tensor among the arguments, numbers and sympy's expressions."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    specs = program.graph_signature.input_specs
    names = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    tensors = ((leaf, values.get(name)) for leaf, name in enumerate(names))
    return {
        leaf: tuple(map(identity_of, value.shape))
        for leaf, value in tensors
        if isinstance(value, torch.Tensor)
    }


def _range(environment: Any, symbol: sympy.Symbol) -> tuple[int, int]:
    found = environment.var_to_range[symbol]
    upper = int(found.upper) if found.upper.is_Integer else LARGEST
    return max(int(found.lower), 2), min(upper, LARGEST)


def _guards(environment: Any) -> list[Condition]:
    found = (guard.expr.xreplace(environment.replacements) for guard in environment.guards)
    return [_condition(each) for each in found if each is not sympy.true and each != sympy.true]


def _element_counts(program: ExportedProgram) -> list[Condition]:
    """Return guards: no tensor of the program has more elements than an index can count."""
    counts: set[sympy.Expr] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                count = sympy.Mul(*map(identity_of, tensor.shape))
                if not count.is_Integer:
                    counts.add(count)
    return [Condition("<=", (_size(count), LARGEST)) for count in _largest(counts)]


def _largest(counts: Iterable[sympy.Expr]) -> list[sympy.Expr]:
    """Leave out products that never exceed another: those of the same symbols, or of fewer."""
    parts = {count: _factors(count) for count in counts}

    def is_within(a: sympy.Expr, b: sympy.Expr) -> bool:
        (factor, powers), (other, others) = parts[a], parts[b]
        return factor <= other and all(powers[s] <= others.get(s, 0) for s in powers)

    ordered = sorted(parts, key=str)
    return [
        a
        for i, a in enumerate(ordered)
        if not any(
            is_within(a, b) and (not is_within(b, a) or j < i)
            for j, b in enumerate(ordered)
            if j != i
        )
    ]


def _complexity(expression: Any) -> tuple[int, str]:
    return int(sympy.count_ops(expression)), str(expression)


def _factors(count: sympy.Expr) -> tuple[int, dict[sympy.Expr, int]]:
    factor, rest = count.as_coeff_Mul()
    return int(factor), {base: int(power) for base, power in rest.as_powers_dict().items()}


def _size(expression: Any) -> Size:
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 1:
        return Term("*", (_size(expression.base),) * int(expression.exp))
    if (quotient := _rounded_quotient(expression)) is not None:
        return quotient
    operator = _TERMS.get(type(expression))
    if operator is None:
        raise UnsupportedOperator(
            ["aten.sym_size.int"], f"the size {expression} cannot be expressed"
        )
    return Term(operator, tuple(map(_size, expression.args)))


def _rounded_quotient(expression: Any) -> Size | None:
    """Return what `int(n / 3)`, `int(n * 0.75)` or `math.ceil(n - 0.5)` are in whole numbers.

    None if it is something else, or the float that is rounded may not be on the same side of a
    whole number as the quotient: for a single size, which has 31 bits, and numbers of a few, it is.
    """
    if type(expression) not in (functions.TruncToInt, functions.FloorToInt, functions.CeilToInt):
        return None
    if (line := _line(expression.args[0])) is None:
        return None
    size, factor, more = line
    if abs(factor) == 1 and not more:  # such as the elements of `arange(n - 1, -1, -1.0)`
        return _size(sympy.expand(size * int(factor)))
    divisor = lcm(factor.denominator, more.denominator)
    count, rest = int(factor * divisor), int(more * divisor)
    if not isinstance(size, sympy.Symbol) or max(count, abs(rest), divisor) >= 2**16:
        return None
    if count <= 0 or (isinstance(expression, functions.TruncToInt) and 2 * count + rest < 0):
        return None
    if isinstance(expression, functions.CeilToInt):
        rest += divisor - 1
    if count % divisor == 0:
        count, rest, divisor = count // divisor, rest // divisor, 1
    found = _size(size) if count == 1 else Term("*", (count, _size(size)))
    if rest:
        found = Term("+", (found, rest))
    return found if divisor == 1 else Term("//", (found, divisor))


def _line(expression: Any) -> tuple[Any, Fraction, Fraction] | None:
    """Return the size, the factor and the summand of a float computed from one size."""
    match expression:
        case functions.ToFloat(args=(size,)):
            return size, Fraction(1), Fraction(0)
        case functions.IntTrueDiv(args=(size, sympy.Integer() as divisor)) if divisor > 0:
            return size, Fraction(1, int(divisor)), Fraction(0)
        case functions.FloatTrueDiv(args=(inner, sympy.Float() as divisor)) if (
            abs(frexp(float(divisor))[0]) == 0.5  # a power of two, by which division is exact
        ):
            number, summand = 1 / Fraction(float(divisor)), Fraction(0)
        case sympy.Mul(args=(sympy.Float() as factor, inner)):
            number, summand = Fraction(float(factor)), Fraction(0)
        case sympy.Add(args=(sympy.Float() as more, inner)):
            number, summand = Fraction(1), Fraction(float(more))
        case _:
            return None
    if (line := _line(inner)) is None:
        return None
    size, factor, more = line
    return size, factor * number, more * number + summand


def _condition(expression: Any) -> Condition:
    if (joined := _JOINED.get(type(expression))) is not None:
        return Condition(joined, tuple(map(_condition, expression.args)))
    operator, is_swapped = _CONDITIONS.get(type(expression), ("", False))
    if not operator:
        raise UnsupportedOperator(
            ["aten.sym_size.int"], f"the condition {expression} cannot be expressed"
        )
    operands: Callable[..., Any] = reversed if is_swapped else iter
    return Condition(operator, tuple(map(_size, operands(expression.args))))
