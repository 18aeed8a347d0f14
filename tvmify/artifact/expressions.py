"""Sizes and conditions over symbols: the language in which a program says what shapes it serves.

A size is a number, the name of a symbol, or a `Term`; a `Condition` compares sizes, or joins
conditions. They are data: nothing here or in native code (``native/expressions.cpp``) executes
text. Arithmetic is Python's on whole numbers, in 64 bits: a result that does not fit, like a
division by zero, is an error, and a program with such a guard does not serve the call.

In JSON a term or condition is a list of its operator and its operands: ``["//", "s0", 2]``.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

#: The greatest number that native code can hold; the least is ``-LARGEST - 1``.
LARGEST = (1 << 63) - 1
#: How deep operations may be nested, so that recursion over them ends soon.
DEEPEST = 64
#: How many operations and operands one size or condition may have.
LONGEST = 4096

#: A number, the name of a symbol, or an operation on sizes.
Size: TypeAlias = "int | str | Term"

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
}
#: Operators that take two operands or more; the others take two, and ``not`` takes one.
_MANY = frozenset({"+", "*", "min", "max", "and", "or"})
#: How tightly operators bind in text.
_BINDING = {"or": 1, "and": 2, "not": 3} | dict.fromkeys(_COMPARISONS, 4)
_BINDING |= {"+": 5, "-": 5, "*": 6, "//": 6, "%": 6}


@dataclass(frozen=True)
class _Operation:
    """An operator and its operands.

    Raises
    ------
    ValueError
        The operator does not belong to the class, an operand is of another kind, or it is too long.
    """

    kind: ClassVar[str]
    operator: str
    operands: tuple[Any, ...]
    depth: int = field(init=False, repr=False, compare=False)
    length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = isinstance(self.operator, str) and self._takes(self.operator)
        expect(known, f"{reprlib.repr(self.operator)} is not an operator of a {self.kind}")
        expect(isinstance(self.operands, tuple), f"the operands of {self.operator} are not a tuple")
        count, wanted = len(self.operands), 1 if self.operator == "not" else 2
        fits = count >= wanted if self.operator in _MANY else count == wanted
        expect(fits, f"{self.operator} has {count} operands")
        for operand in self.operands:
            self._check(operand)
        inner = [operand for operand in self.operands if isinstance(operand, _Operation)]
        object.__setattr__(self, "depth", 1 + max((o.depth for o in inner), default=0))
        object.__setattr__(self, "length", 1 + count + sum(o.length for o in inner))
        short = self.depth <= DEEPEST and self.length <= LONGEST
        expect(short, f"a {self.kind} of {self.length} parts, {self.depth} deep")

    @staticmethod
    def _takes(name: str) -> bool:
        """Whether an operator belongs to this class."""
        raise NotImplementedError

    def _check(self, operand: Any) -> None:
        """Refuse an operand of another kind."""
        check_size(operand)

    def __str__(self) -> str:
        if self.operator in ("min", "max"):
            return f"{self.operator}({', '.join(map(str, self.operands))})"
        binding = _BINDING[self.operator]
        texts = [
            f"({operand})" if _binding(operand) < binding + (place > 0) else str(operand)
            for place, operand in enumerate(self.operands)
        ]
        return f"not {texts[0]}" if self.operator == "not" else f" {self.operator} ".join(texts)

    def to_json(self) -> list[Any]:
        """Return values that JSON can hold."""
        return [self.operator, *map(to_json, self.operands)]


def _binding(operand: Any) -> int:
    return _BINDING.get(operand.operator, 7) if isinstance(operand, _Operation) else 7


@dataclass(frozen=True)
class Term(_Operation):
    """An operation on sizes: ``+ * min max`` on two or more of them, ``- // %`` on two."""

    kind: ClassVar[str] = "size"
    operands: tuple[Size, ...]

    @staticmethod
    def _takes(name: str) -> bool:
        return name in _ARITHMETIC

    def __str__(self) -> str:  # a dataclass inherits it, and type checkers want to see that
        return super().__str__()


@dataclass(frozen=True)
class Condition(_Operation):
    """A comparison of two sizes, ``== != < <=``, or conditions joined by ``and or not``."""

    kind: ClassVar[str] = "condition"
    operands: tuple[Size | Condition, ...]

    @staticmethod
    def _takes(name: str) -> bool:
        return name in _COMPARISONS or name in ("and", "or", "not")

    def _check(self, operand: Any) -> None:
        if self.operator in _COMPARISONS:
            check_size(operand)
        else:
            _check_condition(operand)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it is true for these values of the symbols.

        As in Python, the operands of ``and`` and ``or`` are looked at one by one until one decides.

        Raises
        ------
        ArithmeticError
            A number does not fit into 64 bits, or a divisor is zero.
        KeyError
            A symbol has no value.
        """
        if self.operator in _COMPARISONS:
            left, right = (value_of(operand, values) for operand in self.operands)  # type: ignore[arg-type]  # checked
            return _COMPARISONS[self.operator](left, right)
        parts = (operand.holds(values) for operand in self.operands)  # type: ignore[union-attr]  # checked
        if self.operator == "not":
            return not next(parts)
        return all(parts) if self.operator == "and" else any(parts)


def check_size(size: Any) -> None:
    """Refuse what is not a size.

    Raises
    ------
    ValueError
        It is neither a number that native code can hold, nor a name, nor a term.
    """
    if type(size) is int:  # type(), because a bool is an int, too
        expect(-LARGEST - 1 <= size <= LARGEST, "a size that has more than 64 bits")
    elif type(size) is not str and not isinstance(size, Term):
        raise ValueError(f"{reprlib.repr(size)} is not a size")


def value_of(size: Size, values: Mapping[str, int]) -> int:
    """Return a size for these values of the symbols.

    Raises
    ------
    ArithmeticError
        A number does not fit into 64 bits, or a divisor is zero.
    KeyError
        A symbol has no value.
    """
    if isinstance(size, str):
        return values[size]
    if isinstance(size, int):
        return size
    first, *others = (value_of(operand, values) for operand in size.operands)
    for other in others:
        first = _ARITHMETIC[size.operator](first, other)
        if not -LARGEST - 1 <= first <= LARGEST:
            raise OverflowError(f"{size} has more than 64 bits")
    return first


def symbols_of(expression: Size | Condition) -> set[str]:
    """Return the names of the symbols in a size or a condition."""
    if isinstance(expression, _Operation):
        return set().union(*map(symbols_of, expression.operands))
    return {expression} if isinstance(expression, str) else set()


def renamed(expression: Any, names: Mapping[str, Size]) -> Any:
    """Return a size or a condition with other names or sizes for its symbols.

    Raises
    ------
    KeyError
        A symbol has no other name.
    """
    if isinstance(expression, _Operation):
        operands = tuple(renamed(operand, names) for operand in expression.operands)
        return type(expression)(expression.operator, operands)
    return names[expression] if isinstance(expression, str) else expression


def to_json(expression: Size | Condition) -> Any:
    """Return a size or a condition as values that JSON can hold."""
    return expression.to_json() if isinstance(expression, _Operation) else expression


def size_from_json(value: Any) -> Size:
    """Read a size that `to_json` returned; it may come from anywhere.

    Raises
    ------
    ValueError
        It does not describe a size.
    """
    size = _from_json(value, DEEPEST)
    check_size(size)
    return size


def condition_from_json(value: Any) -> Condition:
    """Read a condition that `to_json` returned; it may come from anywhere.

    Raises
    ------
    ValueError
        It does not describe a condition.
    """
    condition = _from_json(value, DEEPEST)
    _check_condition(condition)
    return condition


def _from_json(value: Any, depth: int) -> Any:
    if not isinstance(value, list):
        return value
    expect(depth > 0, "a size or condition is nested too deeply")
    match value:
        case [str(name), *operands]:
            kind = Term if Term._takes(name) else Condition
            return kind(name, tuple(_from_json(operand, depth - 1) for operand in operands))
    raise ValueError(f"{reprlib.repr(value)} does not begin with an operator")


def _check_condition(condition: Any) -> None:
    if not isinstance(condition, Condition):
        raise ValueError(f"{reprlib.repr(condition)} is not a condition")


def text_of(sizes: Iterable[Size]) -> str:
    """Return sizes as keys and messages show them: ``[1, s0]``."""
    return f"[{', '.join(map(str, sizes))}]"


def expect(holds: bool, problem: str) -> None:
    """Refuse a value.

    Raises
    ------
    ValueError
        The condition does not hold.
    """
    if not holds:
        raise ValueError(problem)
