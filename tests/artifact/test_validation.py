from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cache.programs import artifact_of
from tvmify.artifact import Artifact
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, Repeated, StateTensor, View
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.artifact.validation import check_references
from tvmify.artifact.writes import Write


def read(**changes: Any) -> Artifact:
    description = json.loads(json.dumps(artifact_of(0).description())) | changes
    return Artifact.from_description(b"library", description)


def test_description_round_trips() -> None:
    assert read() == Artifact.from_description(b"library", artifact_of(0).description())
    read(outputs=[["computed", 0], ["repeated", 0], ["argument", 7], ["state", 0]])
    read(outputs=[["view", ["argument", 0], [2, 0], [3, 1], -4]])
    read(writes=[[["argument", 5], ["computed", 0]]])


def test_shapes_are_read_and_left_out_where_there_are_none() -> None:
    shapes = Shapes((Symbol("s0", 2, 512),), {0: (1, "s0")}, (), (48,))
    artifact = read(shapes=shapes.to_json())
    assert artifact.shapes == shapes
    description = json.loads(artifact.metadata())
    del description["format"]
    again = Artifact.from_description(b"library", description)
    assert again == artifact
    outputs = [["view", ["argument", 0], ["s0"], [1], ["*", 2, "s0"]]]
    viewed = read(shapes=shapes.to_json(), outputs=outputs)
    assert viewed.description()["outputs"] == outputs
    with pytest.raises(ValueError, match="symbol"):
        read(shapes=shapes.to_json(), outputs=[["view", ["argument", 0], ["s1"], [1], 0]])
    assert "shapes" not in artifact_of(0).description()
    assert read().shapes is None


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
        {"needs_contiguous": [["computed", 0]]},
        {"needs_contiguous": [["state", 9]]},
        {"complex": 1},
        {"complex": None},
        {"complex": "0"},
        {"complex": [True]},
        {"complex": [-1]},
        {"complex": [9]},
        {"complex": [1 << 40]},
        {"report": []},
        {"draws": [1]},
        {"verdicts": [1]},
        {"verdicts": {"2": [1.0]}},
        {"verdicts": {"2": ["fast", "slow"]}},
        {"outputs": None},
        {"outputs": [None]},
        {"outputs": [["module", 0]]},
        {"outputs": [["repeated", 0]]},
        {"outputs": [["state", 1]]},
        {"outputs": [["view", ["state", 1], [1], [1], 0]]},
        {"writes": [[["state", 1], ["computed", 0]]]},
        {"writes": [[["computed", 0], ["computed", 0]]]},
        {"writes": 0},
        {"outputs": [["view", ["argument", 0], ["s0"], [1], 0]]},
        {"outputs": [["view", ["argument", 0], [1.5], [1], 0]]},
        {"outputs": [["view", ["argument", 0], [["==", 1, 1]], [1], 0]]},
        {"shapes": None},
        {"shapes": {}},
        {"shapes": {"symbols": [], "leaves": [[0, ["s0"]]], "guards": [], "hints": []}},
    ],
)
def test_invalid_description_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, LookupError)):
        read(**changes)


def test_results_and_writes_must_refer_to_existing_values() -> None:
    view = View(StateTensor(1), Geometry((), (), 0))
    check_references(
        [Computed(9), Repeated(0), Argument(9), view], [Write(StateTensor(1), Computed(9))], 2
    )
    for wrong in ([Repeated(0)], [Computed(0), Repeated(1)]):
        with pytest.raises(ValueError, match="repeats"):
            check_references(wrong, [], 2)
    with pytest.raises(ValueError, match="no state 2 of 2"):
        check_references([StateTensor(2)], [], 2)
    with pytest.raises(ValueError, match="no state 1 of 1"):
        check_references([view], [], 1)
    with pytest.raises(ValueError, match="no state 0 of 0"):
        check_references([], [Write(StateTensor(0), Computed(0))], 0)
