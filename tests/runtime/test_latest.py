"""The latest call is repeated only for the same call of the same module."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tvmify.runtime import Guard, LatestCall, flatten

MODULE: dict[str, Any] = {"scale": 2.0}
X = torch.ones(3)


class Run:
    """Stands for a `Call`: counts its calls, and returns a fixed result."""

    def __init__(self, result: object) -> None:
        self.result, self.calls = result, 0

    def __call__(self, leaves: tuple[Any, ...]) -> object:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def latest_of(run: Run, members: dict[str, Any]) -> LatestCall:
    latest = LatestCall()
    guard = Guard([(members, name, value) for name, value in members.items()], [], [X])
    latest.keep(latest.generation, guard, flatten((X,), {})[1], run, (), 0)
    return latest


def test_initially_empty():
    assert LatestCall()((X,), {}) is NotImplemented


def test_same_call_is_repeated():
    run = Run("result")
    latest = latest_of(run, dict(MODULE))
    assert [latest((torch.zeros(3),), {}) for _ in range(3)] == ["result"] * 3
    assert run.calls == latest.hits == 3


@pytest.mark.parametrize(
    "call",
    [
        ((torch.ones(4),), {}),
        ((torch.ones(3, dtype=torch.float64),), {}),
        ((X, X), {}),
        ((X,), {"flag": True}),
        ((object(),), {}),
        ((), {"x": X}),
    ],
    ids=["shape", "dtype", "count", "keyword", "type", "by name"],
)
def test_another_call_is_not(call: tuple[tuple[Any, ...], dict[str, Any]]):
    run = Run("result")
    assert latest_of(run, dict(MODULE))(*call) is NotImplemented
    assert run.calls == 0


def test_nor_is_one_in_another_mode():
    latest = latest_of(Run("result"), dict(MODULE))
    with torch.inference_mode():
        assert latest((X,), {}) is NotImplemented
    assert latest((X,), {}) == "result"


def test_nor_is_one_of_a_changed_module():
    members = dict(MODULE)
    latest = latest_of(Run("result"), members)
    assert latest((X,), {}) == "result"
    members["scale"] = 3.0
    assert latest((X,), {}) is NotImplemented
    members["scale"] = MODULE["scale"]
    assert latest((X,), {}) == "result"


def test_non_bytes_key_never_matches():
    latest = LatestCall()
    latest.keep(0, Guard([], [], []), None, Run("result"), (), 0)
    assert latest((object(),), {}) is NotImplemented


def test_stale_lookup_is_not_kept_after_forget():
    latest = latest_of(Run("result"), dict(MODULE))
    generation = latest.generation
    latest.forget()
    assert latest((X,), {}) is NotImplemented
    latest.keep(generation, Guard([], [], []), flatten((X,), {})[1], Run("stale"), (), 0)
    assert latest((X,), {}) is NotImplemented


def test_a_call_for_eager_is_not_counted():
    latest = latest_of(Run(NotImplemented), dict(MODULE))
    assert latest((X,), {}) is NotImplemented
    assert latest.hits == 0


def test_an_error_reaches_the_caller():
    latest = latest_of(Run(ValueError("out of range")), dict(MODULE))
    with pytest.raises(ValueError, match="out of range"):
        latest((X,), {})
    assert latest.hits == 0


def test_only_guards_are_kept():
    with pytest.raises(TypeError, match="expected a Guard, got a int"):
        LatestCall().keep(0, 3, b"", Run("result"), (), 0)  # type: ignore[arg-type]


def test_forget_frees_references():
    run = Run("result")
    latest = latest_of(run, dict(MODULE))
    alive = weakref.ref(run)
    del run
    assert alive() is not None
    latest.forget()
    assert alive() is None


def test_a_cycle_through_it_is_garbage():
    run = Run("result")
    members = dict(MODULE)
    latest = latest_of(run, members)
    members["latest"] = run.latest = latest  # type: ignore[attr-defined]
    alive = weakref.ref(run)
    del run, latest, members
    gc.collect()
    assert alive() is None


def test_keywords_may_come_in_another_order():
    latest, run = LatestCall(), Run("result")
    x, y = torch.zeros(3), torch.zeros(4)
    key = flatten((), {"x": x, "y": y})[1]
    latest.keep(latest.generation, Guard([], [], []), key, run, ("x", "y"), 2)
    assert latest((), {"x": x, "y": y}) == latest((), {"y": y, "x": x}) == "result"
    for others in ({"x": y, "y": x}, {"x": x}, {"x": x, "z": y}, {"x": x, "y": y, "z": y}):
        assert latest((), others) is NotImplemented
    assert run.calls == 2


def test_the_order_of_other_keywords_matters():
    latest, run = LatestCall(), Run("result")
    given = {name: torch.zeros(3) for name in "xyz"}
    latest.keep(latest.generation, Guard([], [], []), flatten((), given)[1], run, tuple("xyz"), 1)
    for order in ("xyz", "yxz", "yzx"):
        assert latest((), {name: given[name] for name in order}) == "result"
    for order in ("xzy", "zxy", "zyx"):
        assert latest((), {name: given[name] for name in order}) is NotImplemented
