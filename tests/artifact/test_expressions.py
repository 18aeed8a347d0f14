"""Sizes and conditions: their values, their text, and refused descriptions."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.random_shapes import OTHERS, random_condition, random_size
from tvmify.artifact.expressions import (
    DEEPEST,
    LARGEST,
    Condition,
    Size,
    Term,
    condition_from_json,
    renamed,
    size_from_json,
    symbols_of,
    to_json,
    value_of,
)

NAMES = ["s0", "s1"]


def test_text_is_python_that_means_the_same() -> None:
    rng = random.Random(0)
    compared = 0
    for _ in range(500):
        values = {name: rng.randint(0, 20) for name in NAMES}
        size, condition = random_size(rng, NAMES, 4), random_condition(rng, NAMES, 3)
        for expression, value in ((size, value_of), (condition, Condition.holds)):
            try:
                found = value(expression, values)  # type: ignore[arg-type]  # each has its own
            except ArithmeticError:
                continue
            # Python's numbers do not overflow, so only those that fit are compared.
            text = str(expression)
            assert eval(text, {"min": min, "max": max}, values) == found, text  # noqa: S307  # ours
            compared += 1
    assert compared > 400


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (Term("-", ("s0", Term("-", ("s1", 1)))), "s0 - (s1 - 1)"),
        (Term("-", (Term("-", ("s0", "s1")), 1)), "s0 - s1 - 1"),
        (Term("*", (Term("+", ("s0", 1)), 2)), "(s0 + 1) * 2"),
        (Term("max", ("s0", Term("//", ("s1", 2)), 3)), "max(s0, s1 // 2, 3)"),
    ],
)
def test_text_has_the_parentheses_it_needs(size: Size, text: str) -> None:
    assert str(size) == text


def test_conditions_are_shown_as_python_writes_them() -> None:
    even = Condition("==", (Term("%", ("s0", 2)), 0))
    small = Condition("<", ("s0", 9))
    both = Condition("not", (Condition("and", (even, Condition("not", (small,)))),))
    assert str(both) == "not (s0 % 2 == 0 and not s0 < 9)"
    assert not both.holds({"s0": 10})
    assert both.holds({"s0": 8})


@pytest.mark.parametrize(
    ("term", "value"),
    [(("//", (-7, 2)), -4), (("%", (-7, 2)), 1), (("%", (7, -2)), -1), (("-", (2, 9)), -7)],
)
def test_division_rounds_down(term: tuple[str, tuple[int, int]], value: int) -> None:
    assert value_of(Term(*term), {}) == value


@pytest.mark.parametrize(
    "term",
    [
        Term("*", ("s0", "s0")),
        Term("+", (LARGEST, 1, -1)),
        Term("-", (-LARGEST - 1, 1)),
        Term("//", (-LARGEST - 1, -1)),
        Term("//", ("s0", 0)),
        Term("%", ("s0", 0)),
    ],
)
def test_overflow_of_64_bits_raises(term: Term) -> None:
    with pytest.raises(ArithmeticError):
        value_of(term, {"s0": 1 << 40})
    # Unless its value is not needed.
    decided = Condition("or", (Condition("<", (0, "s0")), Condition("==", (term, 0))))
    assert decided.holds({"s0": 1 << 40})


def test_expressions_round_trip() -> None:
    rng = random.Random(1)
    for _ in range(150):
        size, condition = random_size(rng, NAMES, 4), random_condition(rng, NAMES, 3)
        assert size_from_json(json.loads(json.dumps(to_json(size)))) == size
        assert condition_from_json(json.loads(json.dumps(to_json(condition)))) == condition


@pytest.mark.parametrize("value", [v for v in OTHERS if type(v) not in (int, str)] + [1 << 63])
def test_invalid_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        size_from_json(value)


@pytest.mark.parametrize(
    "value",
    [
        "s0",
        True,
        ["+", "s0", 1],
        ["==", "s0"],
        ["==", "s0", 1, 2],
        ["==", ["<", 1, 2], 1],
        ["not", "s0"],
        ["not", ["<", 1, 2], ["<", 1, 2]],
        ["and", ["<", 1, 2]],
        ["and", ["<", 1, 2], 1],
        [["<"], 1, 2],
        ["is", 1, 2],
    ],
)
def test_invalid_condition_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        condition_from_json(value)


def test_depth_and_length_have_limits() -> None:
    deep: Any = "s0"
    for _ in range(DEEPEST):
        deep = ["+", deep, 1]
    assert value_of(size_from_json(deep), {"s0": 0}) == DEEPEST
    for _ in range(800):  # json.loads reads nearly a thousand levels
        deep = ["+", deep, 1]
    for read in (size_from_json, condition_from_json):
        with pytest.raises(ValueError, match="deep"):
            read(deep)
    with pytest.raises(ValueError, match="parts"):
        size_from_json(["+", *range(5000)])


def test_symbols_can_be_renamed() -> None:
    condition = Condition("<=", (Term("+", ("s77", "s31")), 4))
    assert symbols_of(condition) == {"s77", "s31"}
    assert str(renamed(condition, {"s77": "s0", "s31": "s1"})) == "s0 + s1 <= 4"
