"""Sizes, as numbers and as expressions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tvm import tirx

from tvmify.compiler import sizes
from tvmify.compiler.sizes import Range

B, S = tirx.Var("s0", "int64"), tirx.Var("s1", "int64")


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with sizes.symbols({"s0": Range(4, 2, 64), "s1": Range(48, 2, 512)}):
        yield


def test_a_hint_is_a_number() -> None:
    assert sizes.hints([3, tirx.const(5, "int64"), B, B * S]) == [3, 5, 4, 192]
    assert sizes.hint(B - S) == 1
    with pytest.raises(ValueError, match="'other'"):
        sizes.hint(tirx.Var("other", "int64"))


def test_sizes_are_the_same_only_if_they_always_are() -> None:
    assert sizes.same(B * S, S * B)
    assert not sizes.same(B, 4)
    assert not sizes.same(B, S)
    assert sizes.same_shape([1, B], [tirx.const(1, "int64"), tirx.Var("s0", "int64")])


def test_new_symbol_inherits_the_range() -> None:
    rows = sizes.symbol_for(B * S, "rows")
    assert sizes.hint(rows) == 192
    assert sizes.bounds(rows) == (4, 64 * 512)
    assert sizes.proved(rows >= 4)
    assert not sizes.proved(rows >= 5)


def test_arithmetic_keeps_numbers_numbers() -> None:
    assert sizes.product([2, 3, 1]) == 6
    assert sizes.same(sizes.product([1, B, 3]), B * 3)
    assert sizes.ceil_div(17, 8) == 3
    assert sizes.hint(sizes.ceil_div(S, 16)) == 3
    assert sizes.is_one(1)
    assert not sizes.is_one(B)


def test_arguments_of_a_function_have_plain_variables() -> None:
    own = sizes.Variables()
    assert own.of([3, B]) == (3, B)
    first, second = own.of([S + 1, 1 + S])
    assert isinstance(first, tirx.Var) and first.same_as(second)
    assert sizes.hint(first) == 49
    assert sizes.bounds(own(B * S)) == (4, 64 * 512)
    assert sizes.bounds(first) == (3, 513)


def test_multiples_of_a_number_divide_without_a_remainder() -> None:
    with sizes.symbols({"s0": Range(14, 2, 512, factor=7), "s1": Range(48, 2, 512)}):
        assert sizes.same(B // 7 * 7, B)
        assert sizes.same(B // 7 * S * 7, S * B)
        assert not sizes.same(B // 2 * 2, B)
        assert not sizes.same(S // 7 * 7, S)


def test_later_trials_use_distinct_symbol_values() -> None:
    with sizes.symbols({"s0": Range(8, 2, 64), "s1": Range(8, 2, 64)}):
        assert [trial(B) == trial(S) for trial in sizes.trials()] == [True, False, False]
        assert len({trial(B) < trial(S) for trial in sizes.trials()[1:]}) == 2
    with sizes.symbols({}):
        assert [trial(7) for trial in sizes.trials()] == [7]
    with sizes.symbols({"s0": Range(8, 2, 64), "s1": Range(4000, 2, 2**20)}):
        assert all(trial(S - 3000) > 0 for trial in sizes.trials())  # as of a convolution


def test_variables_of_different_sizes_have_different_names() -> None:
    """A symbol is identified by its name: two with the same name would be confused."""
    own = sizes.Variables()
    more, less = own.of([S + 1, S - 1])
    assert not sizes.same(more, less)
    assert sizes.hints([more, less]) == [49, 47]
    assert [sizes.bounds(more), sizes.bounds(less)] == [(3, 513), (1, 511)]
    assert own(S + 1).same_as(more)


def test_a_size_is_a_number_to_compute_with() -> None:
    assert str(sizes.as_number(3, "float32").ty.dtype) == "float32"
    assert str(sizes.as_number(S, "float64").ty.dtype) == "float64"
