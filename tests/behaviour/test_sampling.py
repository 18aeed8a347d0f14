"""The cases of parametrized tests that `make test` runs."""

from __future__ import annotations

from itertools import product

from tests.sampling import sample

CASES = [f"tests/test_it.py::test_one[{a}-{b}]" for a, b in product("abc", "uvwx")]


def test_each_test_keeps_its_share_of_cases() -> None:
    names = ["tests/test_it.py::test_two", *CASES, "tests/test_it.py::test_three[a]"]
    kept = sample(names, 3)
    assert len(kept & set(CASES)) == 4
    assert kept >= {"tests/test_it.py::test_two", "tests/test_it.py::test_three[a]"}


def test_values_of_all_parameters_are_mixed() -> None:
    kept = [name.partition("[")[2].rstrip("]").split("-") for name in sample(CASES, 3)]
    assert len({a for a, _ in kept}) > 1
    assert len({b for _, b in kept}) > 1


def test_the_order_of_cases_does_not_matter() -> None:
    assert sample(CASES, 3) == sample(reversed(CASES), 3)


def test_a_step_of_one_keeps_everything() -> None:
    assert sample(CASES, 1) == set(CASES)
