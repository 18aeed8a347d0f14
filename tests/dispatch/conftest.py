"""Fixtures for several tests of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dispatch.nets import Scaled, X
from tvmify import tvmify as decorate
from tvmify.dispatch import attempt


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Count the calls of a function, given its owner and name.

    The returned list gets ``note(*args)`` for each call.
    """

    def count(owner: Any, name: str, note: Callable[..., Any] = lambda *args: None) -> list[Any]:
        notes: list[Any] = []
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            notes.append(note(*args))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        return notes

    return count


@pytest.fixture
def captured(count_calls: Callable[..., list[Any]]) -> list[int]:
    """Get the number of rows of each call that is captured."""
    return count_calls(attempt, "capture", lambda _, args, *rest: len(args[0]))


@pytest.fixture
def pair() -> tuple[Any, Scaled]:
    """A compiled module that was called once, and the eager one that shares its parts."""
    plain = Scaled().eval()
    fast = decorate(plain, strict=True)
    with torch.no_grad():
        fast(X)
    return fast, plain
