"""Tests that need a GPU; elsewhere they are skipped, with that reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without a GPU."""
    if not torch.cuda.is_available():
        reason = pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is False")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each of the floating-point types that networks run in on GPUs."""
    return getattr(torch, request.param)


@pytest.fixture(autouse=True)
def whole_float32() -> Iterator[None]:
    """Turn off TF32, which PyTorch allows in convolutions: it has the digits of float16."""
    backends: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed
