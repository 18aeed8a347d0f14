"""Tests that need a GPU; elsewhere they are skipped, with that reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where there is no GPU."""
    if not torch.cuda.is_available():
        reason = pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is False")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each of the floating-point types that networks run in on GPUs."""
    return getattr(torch, request.param)
