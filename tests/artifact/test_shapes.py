"""The shapes that a program serves: calls that match them, and refused descriptions."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import pytest

from tests.random_shapes import damaged, random_call, random_shapes
from tvmify.artifact.expressions import LARGEST, Condition, Term, renamed, value_of
from tvmify.artifact.shapes import Shapes, Symbol

EVEN = Condition("==", (Term("%", ("s1", 2)), 0))
SHAPES = Shapes(
    (Symbol("s0", 1, 16), Symbol("s1", 2, 512)),
    {2: ("s1", Term("*", ("s0", "s1"))), 0: ("s0", "s1", 8)},
    (EVEN,),
    (4, 48),
)


def test_a_call_gives_symbols_their_values() -> None:
    assert SHAPES.solve([[3, 10, 8], None, [10, 30]]) == {"s0": 3, "s1": 10}
    assert SHAPES.why_not([[3, 10, 8], None, [10, 30]]) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ([[3, 10, 8], None], "the call has 2 arguments"),
        ([[3, 10, 8], None, None], "leaf 2 is not a tensor: expected [s1, s0 * s1]"),
        ([[3, 10, 8], [1], [10, 30]], "leaf 1 is [1]: expected no tensor"),
        ([[3, 10, 8], None, [10, 30], [1]], "leaf 3 is [1]: expected no tensor"),
        ([[3, 10], None, [10, 30]], "leaf 0 is [3, 10]: expected [s0, s1, 8]"),
        ([[3, 10, 7], None, [10, 30]], "size 2 of leaf 0 is 7: expected 8"),
        (
            [[3, 10, 8], None, [9, 30]],
            "size 0 of leaf 2 is 9: expected s1 = 10",
        ),
        (
            [[3, 10, 8], None, [10, 31]],
            "size 1 of leaf 2 is 31: expected s0 * s1 = 30, where s0 = 3, s1 = 10",
        ),
        ([[0, 10, 8], None, [10, 0]], "1 <= s0 <= 16 does not hold where s0 is 0"),
        ([[1, 514, 8], None, [514, 514]], "2 <= s1 <= 512 does not hold where s1 is 514"),
        ([[3, 11, 8], None, [11, 33]], "s1 % 2 == 0 does not hold, where s1 = 11"),
    ],
)
def test_difference_is_named(call: list[Any], reason: str) -> None:
    assert SHAPES.solve(call) is None
    assert SHAPES.why_not(call) == reason


def test_a_guard_without_a_value_does_not_hold() -> None:
    product = Condition("<", (Term("*", ("s0", "s0", "s0")), 1 << 31))
    quotient = Condition("==", (Term("//", (12, "s0")), 4))
    shapes = Shapes((Symbol("s0", 0),), {0: ("s0",)}, (product, quotient), (3,))
    assert shapes.solve([[3]]) == {"s0": 3}
    assert "s0 * s0 * s0 has no value, where s0" in str(shapes.why_not([[1 << 40]])).replace(
        f" < {1 << 31}", ""
    )
    assert "12 // s0 == 4 has no value, where s0 = 0" in str(shapes.why_not([[0]]))


def test_guards_give_the_divisor_of_a_size() -> None:
    sevens = Term("//", ("s0", 7))
    guards = (
        EVEN,
        Condition("==", (0, Term("%", ("s1", 6)))),
        Condition("==", (Term("%", ("s0", sevens)), 0)),
        Condition("==", (Term("//", ("s0", sevens)), 7)),
    )
    shapes = Shapes(SHAPES.symbols, SHAPES.leaves, guards, SHAPES.hints)
    assert [shapes.factor(name) for name in ("s0", "s1")] == [7, 6]
    assert [SHAPES.factor(name) for name in ("s0", "s1")] == [1, 2]
    one_half = Shapes(SHAPES.symbols, SHAPES.leaves, guards[2:3], SHAPES.hints)
    assert one_half.factor("s0") == 1


def test_random_calls_are_served_exactly_if_all_holds() -> None:
    rng = random.Random(0)
    served = 0
    for _ in range(600):
        shapes = random_shapes(rng)
        call = random_call(rng, shapes)
        values = shapes.solve(call)
        assert (values is None) == (shapes.why_not(call) is not None)
        if values is not None:
            served += 1
            sizes = {leaf: [value_of(s, values) for s in w] for leaf, w in shapes.leaves.items()}
            assert sizes == {leaf: shape for leaf, shape in enumerate(call) if shape is not None}
            assert all(guard.holds(values) for guard in shapes.guards)
            assert all(s.lower <= values[s.name] <= s.upper for s in shapes.symbols)
    assert 120 < served < 560


def test_torch_symbol_names_become_canonical() -> None:
    def shapes(first: str, second: str) -> Shapes:
        symbols = [Symbol("unused", 0, 9), Symbol(first, 2, 512), Symbol(second, 1, 16)]
        leaves = {1: [first], 0: [second, first]}
        guards = [renamed(EVEN, {"s1": first}), Condition("<", (second, first))]
        return Shapes.canonical(symbols, leaves, guards, {first: 48, second: 4})

    one, other = shapes("s77", "s31"), shapes("s0", "s1")
    assert one == other
    assert hash(one) == hash(other)
    assert one.key_text() == other.key_text()
    assert [one.leaf_text(leaf) for leaf in (0, 1)] == ["[s0, s1]", "[s1]"]
    assert one.hints == (4, 48)
    assert one.lines() == [
        "1 <= s0 <= 16, tuned for 4",
        "2 <= s1 <= 512, tuned for 48",
        "s0 < s1",
        "s1 % 2 == 0",
    ]


def test_every_symbol_occurs_alone() -> None:
    with pytest.raises(ValueError, match="no axis has the size b"):
        Shapes.canonical([Symbol("a", 1)], {0: ["a", Term("*", (2, "b"))]}, [], {"a": 1})
    with pytest.raises(ValueError, match="no range or no hint of a"):
        Shapes.canonical([Symbol("a", 1)], {0: ["a"]})


@pytest.mark.parametrize(
    "other",
    [
        Shapes(SHAPES.symbols, SHAPES.leaves, (), (4, 48)),
        Shapes(SHAPES.symbols, SHAPES.leaves, (EVEN,), (4, 16)),
        Shapes((Symbol("s0", 1, 15), SHAPES.symbols[1]), SHAPES.leaves, (EVEN,), (4, 48)),
        Shapes(SHAPES.symbols, {0: ("s0", "s1", 8)}, (EVEN,), (4, 48)),
    ],
)
def test_other_shapes_are_others(other: Shapes) -> None:
    assert other != SHAPES
    assert other.key_text() != SHAPES.key_text()


def test_shapes_round_trip() -> None:
    rng = random.Random(1)
    for _ in range(200):
        shapes = random_shapes(rng)
        again = Shapes.from_json(json.loads(json.dumps(shapes.to_json())))
        assert again == shapes
        assert hash(again) == hash(shapes)
        assert pickle.loads(pickle.dumps(shapes)) == shapes


def test_a_damaged_description_is_refused_or_describes_other_shapes() -> None:
    rng = random.Random(2)
    refused = 0
    for _ in range(800):
        description = damaged(rng, random_shapes(rng).to_json())
        try:
            shapes = Shapes.from_json(description)
        except ValueError:
            refused += 1
            continue
        assert shapes.to_json() == {**description, "leaves": sorted(description["leaves"])}
        shapes.solve(random_call(rng, shapes) if shapes.leaves else [])
    assert 400 < refused < 800


@pytest.mark.parametrize(
    "change",
    [
        {"symbols": [["s0", 1, 16], ["s1", 2, 512], ["s2", 0, 1]], "hints": [4, 48, 1]},
        {"symbols": [["s1", 1, 16], ["s0", 2, 512]]},
        {"symbols": [["s0", 17, 16], ["s1", 2, 512]]},
        {"symbols": [["s0", -1, 16], ["s1", 2, 512]]},
        {"symbols": [["s0", 1, LARGEST + 1], ["s1", 2, 512]]},
        {"symbols": [["s0", 1, 16]], "hints": [4]},
        {"leaves": [[0, ["s1", "s0", 8]]]},
        {"leaves": [[0, ["s0", "s1"]], [0, ["s0", "s1"]]]},
        {"leaves": [[True, ["s0", "s1"]]]},
        {"leaves": [[-1, ["s0", "s1"]]]},
        {"guards": [["<", "s0", "s2"]]},
        {"guards": ["s0"]},
        {"hints": [4]},
        {"hints": [4, 513]},
        {"hints": [True, 48]},
        {"others": []},
    ],
)
def test_a_forged_description_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Shapes.from_json(SHAPES.to_json() | change)
