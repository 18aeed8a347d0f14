"""Native code and Python agree on the calls that a program serves."""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any

import pytest
import torch

from tests.random_shapes import damaged, random_call, random_shapes
from tvmify.artifact.expressions import DEEPEST, LARGEST, Condition, Term
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.runtime import ShapeGuard, native

#: How many shapes are tried; ``make fuzz`` sets it.
SHAPES = int(os.environ.get("TVMIFY_MUTANTS", "400"))
WHOLE = torch.empty(1)


def tensor(sizes: list[int]) -> torch.Tensor:
    """Return a tensor of any sizes that needs hardly any memory."""
    return WHOLE.as_strided(sizes, [0] * len(sizes))


def leaves_of(call: list[list[int] | None]) -> tuple[Any, ...]:
    return tuple(3.0 if shape is None else tensor(shape) for shape in call)


def check(shapes: Shapes, call: list[list[int] | None]) -> bool:
    """Compare the two, and return whether the program serves the call."""
    found, wanted = ShapeGuard(shapes).solve(leaves_of(call)), shapes.solve(call)
    assert found == (None if wanted is None else tuple(wanted.values())), (shapes, call)
    assert ShapeGuard(shapes).serves(leaves_of(call)) == (wanted is not None)
    return wanted is not None


def test_native_code_and_python_agree() -> None:
    rng = random.Random(3)
    served = total = 0
    for _ in range(SHAPES):
        shapes = random_shapes(rng)
        for _ in range(5):
            served += check(shapes, random_call(rng, shapes))
            total += 1
    assert 0.2 * total < served < 0.9 * total


def test_native_and_python_refuse_alike() -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(2 * SHAPES):
        description = damaged(rng, random_shapes(rng).to_json())
        try:
            shapes = Shapes.from_json(description)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError):
                native.ShapeGuard(json.dumps(description))
            continue
        call = random_call(rng, shapes) if shapes.leaves else []
        guard = native.ShapeGuard(json.dumps(description))
        assert guard.serves(leaves_of(call)) == (shapes.solve(call) is not None)
    assert refused > SHAPES


def test_no_text_does_harm() -> None:
    rng = random.Random(5)
    for _ in range(SHAPES):
        text = list(random_shapes(rng).to_text())
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(len(text))] = rng.choice(
                ['"', "[", "]", "{", "\\", "9", "-", ",", ""]
            )
        try:
            guard = native.ShapeGuard("".join(text))
        except ValueError:
            continue
        guard.solve((torch.empty(2, 3), torch.empty(2), torch.empty(3, 2, 4)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "[" * 100_000,
        '{"a":' * 100_000,
        '["]",' * 100_000,
        '{"symbols": [], "leaves": [], "guards": [], "hints": [], "more": []}',
        '{"symbols": [], "leaves": [[0, [9223372036854775808]]], "guards": [], "hints": []}',
        '{"symbols": [], "leaves": [[0, [true]]], "guards": [], "hints": []}',
        '{"symbols": [], "leaves": [[0, [1.0]]], "guards": [], "hints": []}',
    ],
)
def test_invalid_description_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        native.ShapeGuard(text)


@pytest.mark.parametrize("operator", ["+", "-", "*", "//", "%", "min", "max"])
@pytest.mark.parametrize("left", [0, 1, 7, -7, LARGEST, -LARGEST - 1])
@pytest.mark.parametrize("right", [0, 1, -1, 2, -2, LARGEST, -LARGEST - 1])
def test_arithmetic_is_the_same_at_its_limits(operator: str, left: int, right: int) -> None:
    term = Term(operator, (left, right))
    for sign in ("<", "=="):
        guard = Condition("or", (Condition(sign, (term, 3)), Condition("<=", (4, term))))
        check(Shapes((Symbol("s0", 0),), {0: ("s0",)}, (guard,), (0,)), [[5]])


def test_conditions_decide_in_order() -> None:
    undefined = Condition("==", (Term("//", (1, Term("-", ("s0", 5)))), 0))
    other = Condition("!=", ("s0", 5))
    for guard, wanted in [
        (Condition("and", (other, undefined)), False),
        (Condition("or", (Condition("not", (other,)), undefined)), True),
        (Condition("or", (undefined, Condition("not", (other,)))), False),
        (Condition("not", (undefined,)), False),
    ]:
        shapes = Shapes((Symbol("s0", 0),), {0: ("s0",)}, (guard,), (0,))
        assert check(shapes, [[5]]) == wanted
        assert check(shapes, [[8]]) == guard.holds({"s0": 8})


def test_the_deepest_expression_is_decided() -> None:
    size: Any = "s0"
    for _ in range(DEEPEST - 1):
        size = Term("+", (size, 1))
    guard = Condition("==", (size, DEEPEST + 1))
    shapes = Shapes((Symbol("s0", 0),), {0: ("s0",)}, (guard,), (0,))
    assert check(shapes, [[2]])
    assert not check(shapes, [[3]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # warned once per process
def test_tensors_without_plain_sizes_are_not_served() -> None:
    guard = ShapeGuard(Shapes((Symbol("s0", 0),), {0: ("s0", 2)}, (), (0,)))
    assert guard.serves((torch.empty(3, 2),))
    assert not guard.serves((torch.nested.nested_tensor([torch.empty(3, 2)]),))
    with pytest.raises(TypeError, match=re.escape("a tuple")):
        guard.serves([torch.empty(3, 2)])  # type: ignore[arg-type]  # on purpose
