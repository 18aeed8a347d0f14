"""Random sequences of calls and changes agree with eager; `make programs` draws more."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from conformance.events import EVENTS, Side
from conformance.operators import EAGER, Result
from conformance.programs import explore
from conformance.sequences import SEQUENCES, Happening, Setup, check

PLAIN = Setup("Options", training=False, options=())
#: Those that compile much, or have tests of their own.
SLOW = ("save_and_load", "warm_up", "transform", "convert", "parametrize_weight", "tie_weights")


def test_sequence_of_all_changes_matches_eager() -> None:
    """Each after a call of the same kind, so that few of them compile."""
    changes = [name for name in EVENTS if "call" not in name and name not in SLOW]
    assert len(changes) >= 12
    happenings = [
        Happening(name, seed) for seed, change in enumerate(changes) for name in (change, "call")
    ]
    happenings = [replace(one, seed=0) if one.event == "call" else one for one in happenings]
    assert check(happenings, PLAIN).outcome != EAGER


def test_random_sequences_are_of_known_events() -> None:
    drawn = explore(SEQUENCES, lambda given, _: Result(given[0].event), 20, seed=None)
    assert {event for event, _ in drawn} <= EVENTS.keys()
    assert len(drawn) > 5


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
        check([Happening("differ", 0)], PLAIN)
