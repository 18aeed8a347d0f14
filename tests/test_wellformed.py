from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cache.programs import artifact_of
from tvmify.artifact import Artifact


def read(**changes: Any) -> Artifact:
    description = json.loads(json.dumps(artifact_of(0).description())) | changes
    return Artifact.from_description(b"library", description)


def test_what_was_described_is_read() -> None:
    assert read() == Artifact.from_description(b"library", artifact_of(0).description())
    read(outputs=[["tensor", 0], ["same", 0], ["argument", 7], ["state", 0], ["constant", {}]])
    read(outputs=[["view", ["argument", 0, [2, 0], [3, 1], -4]]], writes=[["argument", 5, 0]])


@pytest.mark.parametrize(
    "changes",
    [
        {"more": 1},
        {"library": "x"},
        {"target": None},
        {"output_structure": 3},
        {"inputs": [-1]},
        {"inputs": [True]},
        {"inputs": [0.0]},
        {"inputs": [1 << 64]},
        {"inputs": 3},
        {"weights": [1]},
        {"packed": [None]},
        {"state": [["counter"]]},
        {"needs_contiguous": 1},
        {"report": []},
        {"verdicts": [1]},
        {"verdicts": {"2": [1.0]}},
        {"verdicts": {"2": ["fast", "slow"]}},
        {"outputs": [["tensor"]]},
        {"outputs": [["tensor", -1]]},
        {"outputs": [["tensor", "0"]]},
        {"outputs": [["module", 0]]},
        {"outputs": [[["tensor"], 0]]},
        {"outputs": [["same", 0]]},
        {"outputs": [["state", 1]]},
        {"outputs": [["view", 0]]},
        {"outputs": [["view", ["constant", 0, [1], [1], 0]]]},
        {"outputs": [["view", ["tensor", 0, [-1], [1], 0]]]},
        {"outputs": [["view", ["tensor", 0, [1, 2], [1], 0]]]},
        {"outputs": [["view", ["tensor", 0, [1], [1 << 63], 0]]]},
        {"outputs": [["view", ["tensor", 0, [1], [1], None]]]},
        {"writes": [["state", 1, 0]]},
        {"writes": [["tensor", 0, 0]]},
        {"writes": [["state", 0, -1]]},
        {"writes": [["state", 0]]},
        {"writes": 0},
    ],
)
def test_what_describes_no_program_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, LookupError)):
        read(**changes)
