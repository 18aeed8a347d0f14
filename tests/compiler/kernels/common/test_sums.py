"""Blocks of a reduction."""

from __future__ import annotations

import pytest

from tvmify.compiler.kernels.common.sums import split_evenly


@pytest.mark.parametrize(
    ("length", "longest", "expected"),
    [
        (80, 96, 80),
        (4096, 1024, 1024),
        (1040, 96, 80),
        (1031, 96, 94),
        (92, 10, 4),
        (46, 10, 10),
        (9, 2, 2),
    ],
)
def test_blocks_are_alike_or_the_last_is_shorter(length: int, longest: int, expected: int):
    assert split_evenly(length, longest) == expected
