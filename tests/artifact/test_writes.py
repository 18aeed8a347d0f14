"""Writes: how they are stored, and refused descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmify.artifact.results import Argument, Computed, StateTensor
from tvmify.artifact.writes import Write

INDICES = st.integers(0, (1 << 62) - 1)
TARGETS = st.builds(Argument, INDICES) | st.builds(StateTensor, INDICES)


@given(st.builds(Write, TARGETS, st.builds(Computed, INDICES)))
def test_writes_round_trip(write: Write) -> None:
    assert Write.from_json(json.loads(json.dumps(write.to_json()))) == write


@pytest.mark.parametrize(
    "description",
    [
        0,
        ["state", 0],
        [["state", 0]],
        [["state", 0], 0],
        [["computed", 0], ["computed", 0]],
        [["repeated", 0], ["computed", 0]],
        [["state", 0], ["argument", 0]],
        [["state", 0], ["computed", 0], 0],
    ],
    ids=repr,
)
def test_invalid_write_is_refused(description: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Write.from_json(description)
