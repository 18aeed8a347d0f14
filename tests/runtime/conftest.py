"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tvmify
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


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, saved: a convolution and a linear layer for ``float32[1, 3, 8, 8]``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    ).eval()
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVMIFY_CACHE_DIR", str(path.parent / "cache"))
        patch.setenv("TVMIFY_COMPARE", "0")
        tvmify.save(model, path, example_inputs=torch.ones(1, 3, 8, 8))
    return path
