"""The kinds of results: their parts, and refused descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tvmify.artifact.expressions import Term
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import (
    Argument,
    Computed,
    ComputedSize,
    Constant,
    Repeated,
    Result,
    StateTensor,
    View,
    computed_count,
    hidden,
    materialize,
    tensors_among,
)
from tvmify.artifact.writes import Write

INDICES = st.integers(0, (1 << 62) - 1)
PLACES = st.builds(Argument, INDICES) | st.builds(StateTensor, INDICES)
BASES = PLACES | st.builds(Computed, INDICES)
SIZES = st.sampled_from(["s0", Term("*", ("s0", 4)), Term("+", (Term("//", ("s1", 2)), -1))])
VIEWS = st.builds(
    lambda base, axes, offset: View(
        base, Geometry(tuple(n for n, _ in axes), tuple(n for _, n in axes), offset)
    ),
    BASES,
    st.lists(st.tuples(INDICES | SIZES, INDICES | SIZES), max_size=4),
    st.integers(-(1 << 62) + 1, (1 << 62) - 1) | SIZES,
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NUMBERS = st.builds(ComputedSize, SIZES | st.integers(-(1 << 62), 1 << 62))
RESULTS = BASES | VIEWS | NUMBERS | st.builds(Repeated, INDICES) | st.builds(Constant, SCALARS)
WRITES = st.builds(Write, PLACES, st.builds(Computed, INDICES))
#: Values that replace a part of a description.
OTHERS = st.sampled_from(
    [None, True, -1, 1 << 62, 0.5, "0", "view", "computed", [], {}, ["constant", []], ["view"]]
)


def places(value: Any) -> list[tuple[list[Any], int]]:
    """List all parts of a description, each as its containing list and its index there."""
    found = []
    for i, item in enumerate(value):
        found.append((value, i))
        found += places(item) if isinstance(item, list) else []
    return found


@given(RESULTS)
def test_results_round_trip(result: Result) -> None:
    again = Result.from_json(json.loads(json.dumps(result.to_json())))
    assert again == result and type(again) is type(result)
    assert json.dumps(again.to_json()) == json.dumps(result.to_json())


@given(st.data())
def test_a_damaged_result_is_refused_or_another_result(data: st.DataObject) -> None:
    """A result that is read is complete: it is written as it was read."""
    description = data.draw(st.builds(Result.to_json, RESULTS) | st.builds(Write.to_json, WRITES))
    read = Result.from_json if isinstance(description[0], str) else Write.from_json
    parent, index = data.draw(st.sampled_from(places(description)))
    change = data.draw(st.sampled_from(["replace", "drop", "add"]))
    if change == "replace":
        parent[index] = data.draw(OTHERS)
    elif change == "drop":
        del parent[index]
    else:
        parent.insert(index, data.draw(OTHERS))
    try:
        result = read(description)
    except (TypeError, ValueError):
        return
    assert result.to_json() == description


@pytest.mark.parametrize(
    "description",
    [
        None,
        "computed",
        {"computed": 0},
        [],
        ["module", 0],
        [["computed"], 0],
        ["computed"],
        ["computed", 0, 0],
        ["computed", -1],
        ["computed", True],
        ["computed", "0"],
        ["computed", 0.0],
        ["computed", 1 << 62],
        ["argument", None],
        ["state", [0]],
        ["repeated", -1],
        ["constant", {}],
        ["size"],
        ["size", 0.5],
        ["size", ["sqrt", "s0"]],
        ["size", 1 << 63],
        ["constant", [0]],
        ["view", 0],
        ["view", ["computed", 0], [1], [1]],
        ["view", ["computed", 0, [1], [1], 0]],
        ["view", ["constant", 0], [1], [1], 0],
        ["view", ["repeated", 0], [1], [1], 0],
        ["view", ["view", ["computed", 0], [1], [1], 0], [1], [1], 0],
        ["view", ["computed", 0], [-1], [1], 0],
        ["view", ["computed", 0], [1, 2], [1], 0],
        ["view", ["computed", 0], [1], [1 << 63], 0],
        ["view", ["computed", 0], {}, {}, 0],
        ["view", ["computed", 0], "", "", 0],
        ["view", ["computed", 0], [1], [1], None],
        ["view", ["computed", 0], [1], [1], True],
        ["view", ["computed", 0], [1], [1], -(1 << 62)],
    ],
    ids=repr,
)
def test_invalid_result_is_refused(description: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Result.from_json(description)


def test_leaves_are_the_objects_themselves_and_views_share_their_memory() -> None:
    computed, argument, state = torch.arange(12.0), torch.zeros(2, 6)[1], torch.ones(3)
    results = [
        Computed(0),
        Argument(1),
        StateTensor(0),
        Repeated(0),
        Constant("text"),
        View(Computed(0), Geometry((3, 4), (1, 3), 0)),
        View(Argument(1), Geometry((2,), (3,), -6)),
        View(StateTensor(0), Geometry((), (), 2)),
        Argument(0),
        Repeated(5),
    ]
    leaves = materialize(results, [computed], ["other", argument], [state])
    whole, passed, held, repeated, text, transposed, row, last, other, again = leaves
    assert whole is computed and repeated is computed and passed is argument and held is state
    assert text == "text" and other == "other" and again is transposed
    assert transposed.data_ptr() == computed.data_ptr()
    assert torch.equal(transposed, computed.view(4, 3).t())
    state.fill_(5)
    assert row.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()
    assert row.tolist() == [0, 0] and row.storage_offset() == 0  # relative to the start of its base
    assert last.item() == 5 and last.data_ptr() == state[2].data_ptr()


def test_materialize_accepts_stand_ins() -> None:
    geometry = Geometry((2,), (1,), 1)
    results = [View(Argument(0), geometry), Computed(0), Repeated(0)]
    leaves = materialize(results, ["y"], ["x"], view=lambda view, whole: (whole, view.geometry))
    assert leaves == [("x", geometry), "y", ("x", geometry)]


def test_computed_tensors() -> None:
    view = View(Computed(2), Geometry((), (), 0))
    assert computed_count([Argument(4), Constant(None)]) == 0
    assert computed_count([Computed(0), view, Repeated(0)]) == 3
    assert hidden([Computed(0), view, View(Computed(0), view.geometry)]) == {2}
    assert hidden([view, Computed(2)]) == set()
    assert [r.argument for r in (Argument(3), View(Argument(1), view.geometry), view)] == [
        3,
        1,
        None,
    ]


def test_a_view_is_of_the_sizes_that_symbols_have() -> None:
    geometry = Geometry(
        ("s0", Term("//", ("s1", 2))), (Term("*", ("s1", 2)), 1), Term("-", ("s1", 1))
    )
    assert geometry.symbols() == {"s0", "s1"}
    base = torch.arange(40.0)
    view = geometry.of(base, {"s0": 3, "s1": 6})
    torch.testing.assert_close(view, base.as_strided((3, 3), (12, 1), 5), rtol=0, atol=0)
    assert view.data_ptr() == base[5:].data_ptr()
    with pytest.raises(KeyError):
        geometry.of(base)


def test_tensors_are_distinguished_from_numbers_and_strings() -> None:
    view = View(Computed(0), Geometry((2,), (1,), 0))
    tensors = [Computed(0), Argument(1), StateTensor(0), view, Repeated(1)]
    others = [Argument(0), Constant("s0"), Constant(None), ComputedSize("s0"), Repeated(5)]
    found = tensors_among([*tensors, *others], arguments=[False, True])
    assert found == [True] * 5 + [False] * 5
