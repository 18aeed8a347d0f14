"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.runtime import programs


@pytest.fixture
def thread_count() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def on_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Set what each task of `programs.tasks` does, during this test."""
    return lambda function: monkeypatch.setattr(programs, "on_task", function)
