from __future__ import annotations

import torch

from tests.runtime import programs
from tvmify.runtime import measure


def test_each_artifact_has_its_time():
    seconds = measure([programs.added(), programs.squared()], [torch.ones(4, 16)], [])
    assert len(seconds) == 2
    assert all(0 < time < 1 for time in seconds)


def test_weights_are_bound():
    weights = [torch.ones(8, 16), torch.ones(8)]
    (time,) = measure([programs.linear()], [torch.ones(4, 16)], weights)
    assert time > 0
