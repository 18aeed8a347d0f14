"""Operators whose names are keywords of Python."""

from __future__ import annotations

import torch

from tvmify import tvmify


@tvmify(strict=True)
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).random_(2, 7)


def test_draws_from_a_range_are_recorded() -> None:
    x = torch.ones(3, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = [noisy(x) for _ in range(2)]
        torch.manual_seed(0)
        expected = [torch.empty_like(x).random_(2, 7) for _ in range(2)]
    torch.testing.assert_close(found, expected)
