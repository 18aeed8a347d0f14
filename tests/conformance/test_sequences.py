"""A sequence of calls and changes agrees with eager; `make programs` draws random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from conformance.events import EVENTS, Side
from conformance.operators import EAGER, Result
from conformance.programs import explore
from conformance.sequences import SEQUENCES, SeededEvent, Setup, check

PLAIN = Setup("Options", training=False, options=())
#: Changes that compile a lot, or have their own tests.
SLOW = ("save_and_load", "warm_up", "transform", "convert", "parametrize_weight", "tie_weights")


def test_sequence_of_all_changes_matches_eager() -> None:
    """The same call after each change, so that few calls compile."""
    changes = [name for name in EVENTS if "call" not in name and name not in SLOW]
    assert len(changes) >= 12
    events = [
        event
        for seed, change in enumerate(changes)
        for event in (SeededEvent(change, seed), SeededEvent("call", 0))
    ]
    assert check(events, PLAIN).outcome != EAGER


def test_sequence_of_copies_of_a_decorated_class_matches_eager() -> None:
    seeds = (0, 1, 5)  # of a shallow and a deep copy, and of pickling
    assert [Random(seed).randrange(3) for seed in seeds] == [1, 0, 2]
    events = [
        event
        for seed in seeds
        for event in (SeededEvent("call", 0), SeededEvent("copy_module", seed))
    ]
    result = check([*events, SeededEvent("call", 0)], replace(PLAIN, of_class=True))
    assert result.outcome != EAGER


def test_random_sequences_are_of_known_events() -> None:
    drawn: set[str] = set()

    def note(events: Sequence[SeededEvent], setup: Setup) -> Result:
        drawn.update(event.name for event in events)
        return Result(setup.module)

    explore(SEQUENCES, note, 20, seed=None)
    assert drawn <= EVENTS.keys()
    assert len(drawn) > len(EVENTS) / 2


@pytest.mark.parametrize("difference", ["value", "error", "draw", "alias"])
def test_difference_is_detected(monkeypatch: pytest.MonkeyPatch, difference: str) -> None:
    def differ(side: Side, _: Random) -> Any:
        result = torch.ones(3)
        side.keep(result)
        if not side.is_decorated:
            return result
        if difference == "error":
            raise ValueError
        if difference == "draw":
            torch.rand(1)
        return result + 1e-2 if difference == "value" else result.clone()

    monkeypatch.setitem(EVENTS, "differ", differ)
    what = {"draw": "the random generator", "alias": "what shares memory"}
    with pytest.raises(AssertionError, match=what.get(difference, "the result")):
        check([SeededEvent("differ", 0)], PLAIN)
