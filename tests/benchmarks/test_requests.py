"""Requests of random sizes."""

from __future__ import annotations

from benchmarks import requests


def test_every_process_draws_the_same_sizes() -> None:
    drawn = requests.sizes(200)
    assert drawn == requests.sizes(200)
    assert len(set(drawn)) > 150
    assert {batch for batch, _ in drawn} == set(range(1, 17))
    assert all(5 <= length <= 200 for _, length in drawn)
