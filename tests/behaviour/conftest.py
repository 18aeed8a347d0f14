"""Fixtures for several files of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tvmify import TvmifyWarning


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def quiet(no_grad: None) -> Iterator[None]:
    """Calls may run in eager without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TvmifyWarning)
        yield


@pytest.fixture(scope="module")
def _cache_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shared_cache(_cache_of_the_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests of a file, which compile many equal programs."""
    monkeypatch.setenv("TVMIFY_CACHE_DIR", str(_cache_of_the_file))
