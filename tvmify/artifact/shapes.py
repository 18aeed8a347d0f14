"""Which shapes a program serves: its symbols, the sizes of its arguments, and its guards.

In JSON::

    {
        "symbols": [["s0", 2, 512]],
        "leaves": [[0, [1, "s0"]]],
        "guards": [["==", ["%", "s0", 2], 0]],
        "hints": [48],
    }

Native code reads the same (``native/shapes.cpp``).
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvmify.artifact.expressions import (
    LARGEST,
    Condition,
    Size,
    Term,
    check_size,
    condition_from_json,
    expect,
    renamed,
    size_from_json,
    symbols_of,
    text_of,
    to_json,
    value_of,
)


class Axis(NamedTuple):
    """An axis of a tensor among the flattened arguments of a call."""

    leaf: int
    number: int


@dataclass(frozen=True)
class Symbol:
    """A size that varies from call to call.

    Attributes
    ----------
    name
        Within `Shapes`: ``s0``, ``s1`` and so on.
    lower, upper
        The least and the greatest value, both included.

    Raises
    ------
    ValueError
        The name is not a string, or no size is in the range.
    """

    name: str
    lower: int
    upper: int = LARGEST

    def __post_init__(self) -> None:
        expect(type(self.name) is str, f"{reprlib.repr(self.name)} is not the name of a symbol")
        check_size(self.name)
        numbers = type(self.lower) is int and type(self.upper) is int
        in_order = numbers and 0 <= self.lower <= self.upper <= LARGEST
        expect(in_order, f"a symbol from {reprlib.repr(self.lower)} to {reprlib.repr(self.upper)}")

    def __str__(self) -> str:
        least = f"{self.lower} <= {self.name}"
        return least if self.upper == LARGEST else f"{least} <= {self.upper}"


@dataclass(frozen=True)
class Shapes:
    """The shapes that one program serves; equal for equal programs of different processes.

    Attributes
    ----------
    symbols
        Named ``s0``, ``s1`` and so on, in the order in which they first stand alone as a size.
    leaves
        The sizes of every tensor among the flattened arguments, by the index of its leaf. A call
        with another tensor is not served.
    guards
        What must hold besides.
    hints
        For each symbol the value that the program was tuned for.

    Raises
    ------
    ValueError
        Names are not as above, a symbol never stands alone as a size, or a part is of another kind.
    """

    symbols: tuple[Symbol, ...]
    leaves: Mapping[int, tuple[Size, ...]]
    guards: tuple[Condition, ...] = ()
    hints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expect(all(isinstance(s, Symbol) for s in self.symbols), "a symbol is not a Symbol")
        for leaf, sizes in self.leaves.items():
            expect(
                type(leaf) is int and 0 <= leaf <= LARGEST, f"{reprlib.repr(leaf)} is not a leaf"
            )
            for size in sizes:
                check_size(size)
        expect(all(isinstance(g, Condition) for g in self.guards), "a guard is not a condition")
        object.__setattr__(self, "leaves", dict(sorted(self.leaves.items())))
        names = [symbol.name for symbol in self.symbols]
        expect(
            names == [f"s{i}" for i in range(len(names))], f"symbols named {reprlib.repr(names)}"
        )
        alone = list(_alone(self.leaves))
        expect(
            alone == names,
            f"symbols {reprlib.repr(names)}, of which {reprlib.repr(alone)} stand alone",
        )
        used = set().union(*map(symbols_of, [*self._sizes(), *self.guards]))
        expect(used <= set(names), f"no range of {reprlib.repr(sorted(used - set(names)))}")
        expect(len(self.hints) == len(names), f"{len(self.hints)} hints for {len(names)} symbols")
        for symbol, hint in zip(self.symbols, self.hints, strict=True):
            fits = type(hint) is int and symbol.lower <= hint <= symbol.upper
            expect(fits, f"the hint {reprlib.repr(hint)} where {symbol}")

    def __hash__(self) -> int:
        return hash((self.symbols, tuple(self.leaves.items()), self.guards, self.hints))

    @classmethod
    def canonical(
        cls,
        symbols: Iterable[Symbol],
        leaves: Mapping[int, Sequence[Size]],
        guards: Iterable[Condition] = (),
        hints: Mapping[str, int] | None = None,
    ) -> Shapes:
        """Make one from symbols of any names, such as torch's ``s77``.

        Symbols that no size and no guard contains are dropped.

        Parameters
        ----------
        symbols, leaves, guards
            As the attributes.
        hints
            By name.

        Raises
        ------
        ValueError
            A symbol of a size or of a guard does not stand alone as a size.
        """
        names = canonical_names(leaves)
        given = {symbol.name: symbol for symbol in symbols}
        hints = hints or {}
        guards = list(guards)
        sizes = [size for shape in leaves.values() for size in shape]
        lost = set().union(*map(symbols_of, [*sizes, *guards])) - names.keys()
        expect(not lost, f"no axis has the size {', '.join(sorted(lost))}")
        unknown = [name for name in names if name not in given or name not in hints]
        expect(not unknown, f"no range or no hint of {', '.join(unknown)}")
        written = {str(guard): guard for guard in (renamed(guard, names) for guard in guards)}
        return cls(
            tuple(Symbol(new, given[old].lower, given[old].upper) for old, new in names.items()),
            {leaf: tuple(renamed(size, names) for size in sizes) for leaf, sizes in leaves.items()},
            tuple(guard for _, guard in sorted(written.items())),
            tuple(hints[old] for old in names),
        )

    def solve(self, shapes: Sequence[Sequence[int] | None]) -> dict[str, int] | None:
        """Return the values of the symbols for a call; None if the program does not serve it.

        Parameters
        ----------
        shapes
            For each leaf of the arguments its sizes, or None if it is not a tensor.
        """
        try:
            return self._solve(shapes)
        except _Differs:
            return None

    def why_not(self, shapes: Sequence[Sequence[int] | None]) -> str | None:
        """Return why the program does not serve a call; None if it does. As `solve`."""
        try:
            self._solve(shapes)
        except _Differs as reason:
            return str(reason)
        return None

    def _solve(self, shapes: Sequence[Sequence[int] | None]) -> dict[str, int]:
        if len(shapes) <= max(self.leaves, default=-1):
            raise _Differs(f"the call has {len(shapes)} arguments")
        values: dict[str, int] = {}
        for leaf, shape in enumerate(shapes):
            wanted = self.leaves.get(leaf)
            if shape is None or wanted is None or len(shape) != len(wanted):
                if shape is None and wanted is None:
                    continue
                found = "not a tensor" if shape is None else text_of(shape)
                expected = "no tensor" if wanted is None else text_of(wanted)
                raise _Differs(f"leaf {leaf} is {found}: expected {expected}")
            for size, actual in zip(wanted, shape, strict=True):
                if isinstance(size, str):
                    values.setdefault(size, actual)
        for symbol in self.symbols:
            if not symbol.lower <= values[symbol.name] <= symbol.upper:
                raise _Differs(
                    f"{symbol} does not hold where {symbol.name} is {values[symbol.name]}"
                )
        for leaf, sizes in self.leaves.items():
            for axis, size in enumerate(sizes):
                self._check_size(leaf, axis, size, (shapes[leaf] or ())[axis], values)
        for guard in self.guards:
            self._check_guard(guard, values)
        return values

    @staticmethod
    def _check_size(leaf: int, axis: int, size: Size, actual: int, values: dict[str, int]) -> None:
        where = f"size {axis} of leaf {leaf} is {actual}"
        try:
            expected = value_of(size, values)
        except ArithmeticError as error:
            raise _Differs(
                f"{where}, but {size} has no value{_where(size, values)}: {error}"
            ) from None
        if expected != actual:
            term = "" if isinstance(size, int) else f"{size} = "
            given = _where(size, values) if isinstance(size, Term) else ""
            raise _Differs(f"{where}: expected {term}{expected}{given}")

    @staticmethod
    def _check_guard(guard: Condition, values: dict[str, int]) -> None:
        try:
            holds = guard.holds(values)
        except ArithmeticError as error:
            raise _Differs(f"{guard} has no value{_where(guard, values)}: {error}") from None
        if not holds:
            raise _Differs(f"{guard} does not hold{_where(guard, values)}")

    def factor(self, name: str) -> int:
        """Return a number that the guards let all values of a symbol be multiples of."""
        found: dict[str, dict[Size, int]] = {"%": {}, "//": {}}
        for guard in self.guards:
            terms = [x for x in guard.operands if isinstance(x, Term) and x.operands[0] == name]
            numbers = [x for x in guard.operands if isinstance(x, int)]
            if guard.operator == "==" and terms and numbers and terms[0].operator in found:
                found[terms[0].operator][terms[0].operands[1]] = numbers[0]
        divisors = [divisor for divisor, rest in found["%"].items() if rest == 0]
        # PyTorch writes `s0 % (s0 // 7) == 0` and `s0 // (s0 // 7) == 7` for a view of sevens.
        factors = [found["//"].get(d, 1) if isinstance(d, Term) else d for d in divisors]
        return math.lcm(*(factor for factor in factors if isinstance(factor, int)), 1)

    def leaf_text(self, leaf: int) -> str:
        """Return the sizes of a leaf as a key shows them: ``[1, s0]``."""
        return text_of(self.leaves[leaf])

    def key_text(self) -> str:
        """Return all of it as text, which is equal in every process."""
        sizes = [f"leaf {leaf}: {self.leaf_text(leaf)}" for leaf in self.leaves]
        return "\n".join([*sizes, *self.lines()])

    def lines(self) -> list[str]:
        """Return ranges, hints and guards for people, one a line."""
        ranges = [
            f"{symbol}, tuned for {hint}"
            for symbol, hint in zip(self.symbols, self.hints, strict=True)
        ]
        return [*ranges, *map(str, self.guards)]

    def distance(self, values: Mapping[str, int]) -> float:
        """Return how far a call is from what the program was tuned for: 0 is the same."""
        pairs = zip(self.symbols, self.hints, strict=True)
        return sum(abs(math.log2((values[s.name] + 1) / (hint + 1))) for s, hint in pairs)

    def to_text(self) -> str:
        """Return `to_json` as text, for native code."""
        return json.dumps(self.to_json(), sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can hold."""
        return {
            "symbols": [[symbol.name, symbol.lower, symbol.upper] for symbol in self.symbols],
            "leaves": [[leaf, [*map(to_json, sizes)]] for leaf, sizes in self.leaves.items()],
            "guards": [*map(to_json, self.guards)],
            "hints": list(self.hints),
        }

    @classmethod
    def from_json(cls, value: Any) -> Shapes:
        """Read what `to_json` returned; it may come from anywhere.

        Raises
        ------
        ValueError
            It does not describe shapes.
        """
        match value:
            case {
                "symbols": list(symbols),
                "leaves": list(leaves),
                "guards": list(guards),
                "hints": list(hints),
                **others,
            } if not others:
                read = [_leaf_from_json(leaf) for leaf in leaves]
                expect(len(dict(read)) == len(read), "a leaf occurs twice")
                return cls(
                    tuple(map(_symbol_from_json, symbols)),
                    dict(read),
                    tuple(map(condition_from_json, guards)),
                    tuple(hints),
                )
        raise ValueError(f"{reprlib.repr(value)} describes no shapes")

    def _sizes(self) -> list[Size]:
        return [size for sizes in self.leaves.values() for size in sizes]


class _Differs(Exception):
    """A program does not serve a call, for this reason."""


def canonical_names(leaves: Mapping[int, Sequence[Size]]) -> dict[str, str]:
    """Return the canonical name of each symbol that stands alone as a size."""
    return {name: f"s{i}" for i, name in enumerate(_alone(leaves))}


def _alone(leaves: Mapping[int, Sequence[Size]]) -> dict[str, None]:
    ordered = (size for _, sizes in sorted(leaves.items()) for size in sizes)
    return dict.fromkeys(size for size in ordered if isinstance(size, str))


def _where(expression: Size | Condition, values: Mapping[str, int]) -> str:
    names = sorted(symbols_of(expression)) if isinstance(expression, (str, Term, Condition)) else []
    texts = [f"{name} = {values[name]}" for name in names]
    return f", where {', '.join(texts)}" if texts else ""


def _symbol_from_json(value: Any) -> Symbol:
    match value:
        case [name, lower, upper]:
            return Symbol(name, lower, upper)
    raise ValueError(f"{reprlib.repr(value)} is not a symbol")


def _leaf_from_json(value: Any) -> tuple[int, tuple[Size, ...]]:
    match value:
        case [int(leaf), list(sizes)]:
            return leaf, tuple(map(size_from_json, sizes))
    raise ValueError(f"{reprlib.repr(value)} describes no leaf")


def shape_lines(
    described: Mapping[str, Any], lines: Callable[[Shapes], list[str]] = Shapes.lines
) -> list[str]:
    """List the shapes in JSON that may come from anywhere; empty for a static program."""
    if "shapes" not in described:
        return []
    try:
        return lines(Shapes.from_json(described["shapes"]))
    except ValueError as error:  # written by another version
        return [f"shapes that cannot be read: {error}"]
