"""Settings of a build, as sent to the compiler process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvmify.artifact.settings import BuildSettings
from tvmify.artifact.shapes import Shapes, Symbol

SYMBOLIC = Shapes.canonical([Symbol("s0", 2)], {0: ["s0", 8]}, hints={"s0": 48})


@pytest.mark.parametrize(
    "settings",
    [
        BuildSettings(),
        BuildSettings("strict", ("weight", "bias"), SYMBOLIC, (Path("/tmp/a"), Path("/tmp/b"))),
    ],
    ids=["default", "all"],
)
def test_settings_round_trip(settings: BuildSettings) -> None:
    assert BuildSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
