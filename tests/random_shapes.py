"""Random shapes with symbols and guards, calls that nearly match, and damaged descriptions."""

from __future__ import annotations

import copy
import random
from typing import Any

from tvmify.artifact.expressions import LARGEST, Condition, Size, Term, renamed, value_of
from tvmify.artifact.shapes import Shapes, Symbol, canonical_names

NUMBERS = [0, 1, 2, 3, 8, -1, -7, 512, 1 << 31, 1 << 62, LARGEST, -LARGEST - 1]
#: Values that replace a part of a description.
OTHERS: list[Any] = [None, True, -1, 0, 1, 1 << 63, -(1 << 63) - 1, 1e30, 0.5, "0", "s0", "s9", "+"]
OTHERS += ["==", "not", "", [], {}, ["+", 1], ["not", 1], ["==", "s0", 1], ["-", "s0", 1, 2]]


def random_size(rng: random.Random, names: list[str], depth: int = 3) -> Size:
    """Return a size over symbols."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([rng.choice(names), rng.choice(NUMBERS), rng.randrange(9)])
    operator = rng.choice(["+", "-", "*", "//", "%", "min", "max"])
    count = 2 if operator in ("-", "//", "%") else rng.randint(2, 3)
    return Term(operator, tuple(random_size(rng, names, depth - 1) for _ in range(count)))


def random_condition(rng: random.Random, names: list[str], depth: int = 2) -> Condition:
    """Return a condition over symbols."""
    if depth == 0 or rng.random() < 0.4:
        operator = rng.choice(["==", "!=", "<", "<="])
        return Condition(operator, (random_size(rng, names), random_size(rng, names)))
    operator = rng.choice(["and", "or", "not"])
    count = 1 if operator == "not" else rng.randint(2, 3)
    return Condition(operator, tuple(random_condition(rng, names, depth - 1) for _ in range(count)))


def random_shapes(rng: random.Random) -> Shapes:
    """Return shapes; many calls satisfy the guards, and some guards have no value."""
    names = [f"s{i}" for i in range(rng.randint(1, 3))]
    leaves: dict[int, list[Size]] = {}
    for leaf in rng.sample(range(5), rng.randint(1, 3)):
        sizes = [rng.choice([*names, 1, 4]) for _ in range(rng.randint(0, 3))]
        leaves[leaf] = [random_size(rng, names, 2) if rng.random() < 0.2 else s for s in sizes]
    leaves.setdefault(rng.randrange(5), []).extend(names)
    order = canonical_names(leaves)
    symbols = {n: (lower := rng.randint(0, 3), lower + rng.choice([0, 5, 600])) for n in names}
    return Shapes(
        tuple(Symbol(order[old], *symbols[old]) for old in order),
        {leaf: tuple(renamed(size, order) for size in sizes) for leaf, sizes in leaves.items()},
        tuple(random_condition(rng, list(order.values())) for _ in range(rng.randrange(3))),
        tuple(symbols[old][0] for old in order),
    )


def random_call(rng: random.Random, shapes: Shapes) -> list[list[int] | None]:
    """Return the sizes of the leaves of a call that fits these shapes or nearly does."""
    values = {s.name: rng.randint(s.lower, min(s.upper, s.lower + 9)) for s in shapes.symbols}
    # A damaged description may name any leaf.
    call: list[list[int] | None] = [None] * (min(max(shapes.leaves), 8) + 1)
    for leaf, sizes in shapes.leaves.items():
        shape: list[int] = []
        call[min(leaf, 8)] = shape
        for size in sizes:
            try:
                shape.append(min(max(value_of(size, values), 0), 1 << 20))
            except ArithmeticError:
                shape.append(1)
    if rng.random() < 0.3:
        leaf = rng.randrange(len(call))
        call[leaf] = [rng.randint(0, 9) for _ in call[leaf] or [1]] if rng.random() < 0.7 else None
    if rng.random() < 0.1:
        call.append(rng.choice([None, [2]]))
    return call


def damaged(rng: random.Random, description: Any) -> Any:
    """Return a copy of a description with one part replaced."""
    description = copy.deepcopy(description)
    places: list[tuple[Any, Any]] = []
    todo = [description]
    while todo:
        whole = todo.pop()
        for key in list(whole) if isinstance(whole, dict) else range(len(whole)):
            places.append((whole, key))
            if isinstance(whole[key], (list, dict)):
                todo.append(whole[key])
    whole, key = rng.choice(places)
    if rng.random() < 0.2:
        del whole[key]
    elif rng.random() < 0.2:
        other, place = rng.choice(places)
        whole[key] = copy.deepcopy(other[place])
    else:
        whole[key] = copy.deepcopy(rng.choice(OTHERS))
    return description
