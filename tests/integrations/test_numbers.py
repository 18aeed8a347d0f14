"""Numbers that Dynamo's graphs compute from numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.tolerances import assert_close_to_reference
from tvmify import CacheInfo
from tvmify.integrations.calls import GRAPHS


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    GRAPHS.clear()  # graphs of other tests may still be referenced
    with torch.no_grad():
        yield


def check(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Compare calls with eager, and expect two programs: for the first numbers, and for any."""
    fast = torch.compile(function, backend="tvmify", options={"cache": False})
    for call in calls:
        results = pytree.tree_leaves(fast(*call))
        types = [type(leaf) for leaf in pytree.tree_leaves(function(*call))]
        assert [type(leaf) for leaf in results] == types
        assert_close_to_reference(results, lambda *x: pytree.tree_leaves(function(*x)), call, {})
    found = [d.cache_info() for graph in GRAPHS for d in graph.dispatchers_for(None)]
    assert CacheInfo.total(found).entries == 2


def window(x: torch.Tensor, seen: int) -> tuple[torch.Tensor, int]:
    first = max(seen - 3, 0)
    mask = torch.arange(4) + first > seen - 2
    return x.masked_fill(mask, 0.5), seen + 1


def rounded(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * (n // 2) + n % 3 + min(n, 12)


def only_returned(x: torch.Tensor, n: int) -> dict[str, Any]:
    return {"previous": n - 1, "result": x.relu(), "given": n, "decided": n > 5}


@pytest.mark.parametrize("function", [window, rounded, only_returned])
def test_one_program_serves_all_numbers(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    check(function, *((x, n) for n in (7, 8, 9, 12, 15)))


def test_floats_keep_the_precision_of_python() -> None:
    def scaled(x: torch.Tensor, n: int) -> tuple[torch.Tensor, float]:
        return x * (n / 3), n / 7

    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    check(scaled, *((x, n) for n in (9, 10, 11)))


def test_sizes_and_numbers_together() -> None:
    def grown(x: torch.Tensor, seen: int) -> tuple[torch.Tensor, int, int]:
        return x[: x.shape[0] // 2] + seen * 2, seen + x.shape[0], x.shape[0] * 3

    generator = torch.Generator().manual_seed(0)
    calls = ((torch.randn(rows, 2, generator=generator), rows) for rows in (4, 6, 8, 10))
    check(grown, *((x, rows * 5 + 1) for x, rows in calls))
