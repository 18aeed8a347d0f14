"""Which values count as settings, and which settings are equal."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tvmify.runtime.settings import settings_in


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a", 1], ["a", 1]),
        ({"a": [1, 2], "b": ()}, {"a": [1, 2], "b": ()}),
        ({1, 2}, {2, 1}),
        (([1],), ([1],)),
        ([float("nan")], [float("nan")]),
    ],
)
def test_equal_settings(one: Any, other: Any) -> None:
    first, second = settings_in(one), settings_in(other)
    assert first is not None and second is not None
    assert first.value == second.value and hash(first.value) == hash(second.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a"], ["b"]),
        ([1], [1.0]),
        ([1], [True]),
        ([0.0], [-0.0]),
        ({0.0: 1}, {-0.0: 1}),
        ([complex(1, 0)], [complex(1, -0.0)]),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # forward may iterate
        ({"a": [1]}, {"a": [2]}),
        ({1}, frozenset({1})),
    ],
)
def test_different_settings(one: Any, other: Any) -> None:
    first, second = settings_in(one), settings_in(other)
    assert first is not None and second is not None
    assert first.value != second.value


def test_the_collections_in_a_collection_are_listed() -> None:
    inner, members = [1], {"x"}
    outer = {"a": (inner, 2), "b": members}
    settings = settings_in(outer)
    assert settings is not None
    assert [id(found) for found in settings.collections] == [id(outer), id(inner), id(members)]


def test_non_plain_values_compare_by_identity() -> None:
    tensors, layers, functions = torch.ones(2, 3), (nn.ReLU(), nn.ReLU()), (torch.sin, torch.cos)
    for one, other in (tensors.unbind(), layers, functions):
        for hold in (lambda item: [item], lambda item: (1, {"a": [item]})):
            first, same, second = (settings_in(hold(item)) for item in (one, one, other))
            assert first is not None and same is not None and second is not None
            assert first.value == same.value and first.value != second.value


def test_invalid_settings_are_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    others = [torch.ones(2), 1, {object(): 1}, {torch.ones(2)}, itself, list(range(1000))]
    assert [settings_in(other) for other in others] == [None] * len(others)


def test_tensors_in_a_collection_are_not_kept_alive() -> None:
    tensor = torch.ones(2)
    settings = settings_in((tensor,))
    reference = weakref.ref(tensor)
    del tensor
    assert settings is not None and reference() is None
