"""Calls that differ in sizes and numbers at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dispatch.generality.nets import Linear, check, compiled, drawn
from tvmify.dispatch.generality import numbers


class Scaled(Linear):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return self.linear(x) * scale


class ScaledRecorded(Linear):
    def forward(self, *given: Any) -> torch.Tensor:  # type: ignore[override]
        return self.linear(given[0]) * given[1]


class Cut(Linear):
    """One number decides on a shape."""

    def forward(self, x: torch.Tensor, scale: float, kept: int) -> torch.Tensor:  # type: ignore[override]
        return (self.linear(x) * scale)[:, :kept]


@pytest.mark.parametrize("cls", [Scaled, ScaledRecorded])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_program_serves_any_sizes_and_numbers(cls: type[Linear], dynamic: bool | None) -> None:
    module = cls()
    fast = compiled(module, dynamic)
    for rows, scale in ((3, 0.5), (5, 0.25), (6, -2.0), (7, 3.5), (2, 0.0)):
        check(fast, module, drawn(rows, 8), scale)
    before = fast.cache_info()
    for rows, scale in ((6, 4.5), (3, 1.5), (7, -1.0)):
        check(fast, module, drawn(rows, 8), scale)
    after = fast.cache_info()
    assert (after.builds, after.eager) == (1 if dynamic else 2, 0)
    assert (after.misses, after.hits) == (before.misses, before.hits + 3)


def test_forgetting_the_signatures_of_a_program_builds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numbers, "_MOST_SIGNATURES", 2)
    module = Scaled()
    fast = compiled(module)
    for rows in (*range(2, 9), *range(2, 9)):
        check(fast, module, drawn(rows, 8), rows / 8)
    assert (fast.cache_info().builds, fast.cache_info().eager) == (2, 0)


def test_shape_deciding_number_is_part_of_the_key() -> None:
    module = Cut()
    fast = compiled(module)
    for rows, scale in ((3, 0.5), (5, 0.25), (6, -2.0), (7, 3.5)):
        check(fast, module, drawn(rows, 8), scale, 4)
    assert fast.cache_info().builds <= 3
    check(fast, module, drawn(7, 8), 0.125, 5)
