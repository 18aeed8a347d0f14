"""Sizes of tensors while a program is compiled: numbers, or expressions over symbols.

A program that serves many shapes has symbols among its sizes. Code needs the expression, but an
estimate needs a number: the `hint` of a size is its value for the symbol values that the program is
tuned for. Symbols are identified by name, since TVM creates new variables of the same name when it
splits a program into functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count, islice
from math import gcd, isqrt
from typing import Any, TypeAlias

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Expr

#: A number, or a TVM expression over symbols.
Size: TypeAlias = "int | Expr"


@dataclass(frozen=True)
class Range:
    """The values that a symbol may have.

    Attributes
    ----------
    hint
        The value for estimates.
    lower, upper
        The least and the greatest value.
    factor
        A number that all values are multiples of.
    """

    hint: int
    lower: int
    upper: int
    factor: int = 1


#: Of the likely number, those that `around` returns.
_SHARES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
_RANGES: ContextVar[dict[str, Range] | None] = ContextVar("ranges", default=None)


@contextmanager
def symbols(ranges: Mapping[str, Range]) -> Iterator[None]:
    """Make these symbols known to `hint` and `same`, by name."""
    token = _RANGES.set(dict(ranges))
    try:
        yield
    finally:
        _RANGES.reset(token)


def symbol_for(size: Size, name: str) -> tirx.Var:
    """Return a new symbol for a size, such as the product of two symbols."""
    ranges = _known()
    analyzer = _analyzer([size])
    bound = analyzer.const_int_bound(as_expression(size))
    ranges[name] = Range(hint(size), int(bound.min_value), int(bound.max_value))
    return tirx.Var(name, "int64")


def variable_for(size: Size) -> tirx.Var:
    """Return a variable for a symbolic size: itself, or a symbol that every such size shares.

    A function can take a size from its arguments only where it is a variable.
    """
    return size if isinstance(size, tirx.Var) else symbol_for(size, name_of(size))


def name_of(size: Size) -> str:
    """Return the name of the symbol for a size: the same for equal texts, in every process."""
    return f"size_{sha256(str(size).encode()).hexdigest()[:12]}"


class Variables:
    """Plain variables for the sizes of a function's arguments.

    A function takes a size from its arguments only where that is a variable, and not `s0 + 1`.
    """

    def __init__(self) -> None:
        self._own: list[tuple[Size, tirx.Var]] = []

    def __call__(self, size: Size) -> Size:
        """Return a number or a variable unchanged, and the variable for an expression."""
        if is_static(size) or isinstance(size, tirx.Var):
            return size
        for known, variable in self._own:
            if same(known, size):
                return variable
        self._own.append((size, variable_for(size)))
        return self._own[-1][1]

    def of(self, shape: Iterable[Size]) -> tuple[Any, ...]:
        """Return a shape of plain variables and numbers."""
        return tuple(map(self, shape))

    def meaning(self) -> dict[tirx.Var, Size]:
        """Return the expression that each variable stands for."""
        return {variable: size for size, variable in self._own}


def is_static(*sizes: Any) -> bool:
    """Whether sizes are numbers."""
    return all(isinstance(size, (int, tirx.IntImm)) for size in sizes)


def number_or_expression(size: Any) -> Size:
    """Return a size as an int if it is a number."""
    return int(size) if is_static(size) else size


def sizes_of(shape: Iterable[Any]) -> list[Size]:
    """Return the sizes of a shape, numbers as ints."""
    return [number_or_expression(size) for size in shape]


def hint(size: Any) -> int:
    """Return a size as a number, for estimates only; at least 1 if it is symbolic.

    Raises
    ------
    ValueError
        It has an unknown symbol.
    """
    if is_static(size):
        return int(size)
    # Symbols get their hints independently: the difference of two may be less than it ever is.
    return max(1, _value({name: known.hint for name, known in _known().items()}, size))


def trials() -> list[Callable[[Any], int]]:
    """Return assignments of numbers to all symbols, in which no two sizes are equal by chance.

    A layout of elements that holds for each of them holds for all numbers: sizes are sums and
    products of symbols, and the numbers are primes, once rising and once falling. The first
    assignment has the hints. Without symbols, there is only one.
    """
    names = sorted(_known())
    if not names:
        return [int]
    # A size may be a difference: that of a convolution, whose images are at least so large.
    primes = list(islice(_primes(max(known.hint for known in _known().values())), len(names)))
    return [
        hint,
        *(
            partial(_value, dict(zip(names, order, strict=True)))
            for order in (primes, primes[::-1])
        ),
    ]


def _primes(least: int) -> Iterator[int]:
    """Yield primes above ``least``, and above most numbers that sizes are combined with."""
    numbers = count(max(211, least + 1 | 1), 2)
    return (n for n in numbers if all(n % d for d in range(3, isqrt(n) + 1, 2)))


def hints(shape: Iterable[Any]) -> list[int]:
    """Return the hint of each size of a shape."""
    return [hint(size) for size in shape]


def around(size: Any) -> list[int]:
    """Return numbers around the likely one, which a size may be: tiles should suit them all."""
    likely, (least, most) = hint(size), bounds(size)
    return [max(1, least, min(most, round(likely * share))) for share in _SHARES]


def of_parameters(function: tirx.PrimFunc) -> list[Any]:
    """Return the sizes of a kernel's arguments and results."""
    return [size for p in function.params for size in getattr(p.ty, "shape", ())]


def variables_of(size: Any) -> list[tirx.Var]:
    """Return the symbols of a size."""
    return [] if is_static(size) else list(tirx.analysis.undefined_vars(size, []))


def with_variables(size: Any, variables: Mapping[str, tirx.Var]) -> Any:
    """Return a size with other symbols in place of those of the same names."""
    own = {v: variables[v.name] for v in variables_of(size) if v.name in variables}
    return tvm_ffi.structural_map(size, [(tirx.Var, lambda v: own.get(v, v))]) if own else size


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal in all calls, not merely in one."""
    if is_static(a, b):
        return int(a) == int(b)
    first, second = (_of_quotients(as_expression(size)) for size in (a, b))
    return bool(_analyzer([first, second]).can_prove_equal(first, second))


def _of_quotients(size: Expr) -> Expr:
    """Return a size with ``n * (s0 / n)`` in place of a symbol that is a multiple of `n`."""
    ranges = _known()

    def multiple(variable: tirx.Var) -> Expr:
        known = ranges.get(variable.name)
        if known is None or known.factor == 1:
            return variable
        factor, name = known.factor, f"{variable.name}_by_{known.factor}"
        least = -(-known.lower // factor)
        ranges[name] = Range(max(known.hint // factor, least), least, known.upper // factor)
        return tirx.Var(name, variable.ty) * factor

    return tvm_ffi.structural_map(size, [(tirx.Var, multiple)])


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether two shapes are equal in all calls."""
    first, second = list(a), list(b)
    return len(first) == len(second) and all(map(same, first, second))


def proved(condition: Expr) -> bool:
    """Whether a condition holds for all values of its symbols."""
    return bool(_analyzer([condition]).can_prove(condition))


def holds(condition: bool | Expr) -> bool:
    """Whether a comparison of sizes is true in all calls."""
    return condition if isinstance(condition, bool) else proved(condition)


def product(shape: Iterable[Any]) -> Size:
    """Return the number of elements of a shape."""
    result: Any = 1
    for size in sizes_of(shape):
        if is_static(size) and size == 1:
            continue
        result = size if is_static(result) and result == 1 else result * size
    return result


def simplified(size: Any) -> Size:
    """Return a size as TVM simplifies it."""
    return int(size) if is_static(size) else _analyzer([size]).simplify(size)


def factor(size: Any) -> int:
    """Return a number that a symbolic size is a multiple of in all calls."""
    found = _analyzer([size]).modular_set(as_expression(size))
    return gcd(int(found.coeff), int(found.base))


def ceil_div(size: Any, step: int) -> Size:
    """Return how many steps cover a size, in the form in which TVM can prove that they do."""
    if is_static(size):
        return -(-int(size) // step)
    return tirx.floordiv(size - 1, step) + 1


def as_expression(size: Any) -> Expr:
    """Return a size as TVM has it in the shapes of tensors."""
    return tirx.const(int(size), "int64") if is_static(size) else size


def as_number(size: Any, dtype: str) -> Expr:
    """Return a size as a number of a dtype, to compute with."""
    return tirx.const(int(size), dtype) if is_static(size) else size.astype(dtype)


def is_one(size: Any) -> bool:
    """Whether a size is 1 in all calls. A symbol never is: it is at least 2."""
    return is_static(size) and int(size) == 1


def comparable(size: Any) -> int | str:
    """Return a hashable value that is equal for equal sizes."""
    return int(size) if is_static(size) else str(size)


def bounds(size: Any) -> tuple[int, int]:
    """Return the least and the greatest value of a size."""
    if is_static(size):
        return int(size), int(size)
    bound = _analyzer([size]).const_int_bound(size)
    return int(bound.min_value), int(bound.max_value)


def analyzer_of(extents: Mapping[tirx.Var, Size]) -> sym.Analyzer:
    """Return an analyzer that knows index variables, each from 0 to before its extent."""
    analyzer = _analyzer(list(extents.values()))
    for variable, extent in extents.items():
        analyzer.bind(
            variable, ir.Range.from_min_extent(tirx.const(0, "int64"), as_expression(extent))
        )
    return analyzer


def _known() -> dict[str, Range]:
    ranges = _RANGES.get()
    return {} if ranges is None else ranges


def _value(numbers: Mapping[str, int], size: Any) -> int:
    """Return a size where symbols, by name, are numbers."""
    if is_static(size):
        return int(size)
    analyzer = sym.Analyzer()
    for variable in variables_of(size):
        if variable.name not in numbers:
            raise ValueError(f"unknown symbol {variable.name!r}")
        analyzer.bind(variable, tirx.const(numbers[variable.name], str(variable.ty.dtype)))
    value = analyzer.simplify(size)
    if not isinstance(value, tirx.IntImm):
        raise ValueError(f"the size {size} has no number")
    return int(value)


def _analyzer(expressions: Sequence[Any]) -> sym.Analyzer:
    """Return an analyzer that knows the ranges of symbols, and takes those of one name for one."""
    analyzer = sym.Analyzer()
    ranges = _known()
    first: dict[str, tirx.Var] = {}
    for variable in (v for each in expressions for v in variables_of(each)):
        name = variable.name
        if name in first:
            if not first[name].same_as(variable):
                analyzer.bind(variable, first[name])
            continue
        first[name] = variable
        if name in ranges:
            dtype = str(variable.ty.dtype)
            least = tirx.const(ranges[name].lower, dtype)
            span = tirx.const(ranges[name].upper - ranges[name].lower + 1, dtype)
            analyzer.bind(variable, ir.Range.from_min_extent(least, span))
    return analyzer
