"""The backend under its name, and Dynamo without the programs of earlier tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.backends import registry

from tvmify.integrations.torch_compile import backend


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the backend here: an editable install may be older than its entry point."""
    torch._dynamo.reset()
    registry._lazy_import()
    monkeypatch.setitem(registry._BACKENDS, "tvmify", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "tvmify", backend)
    yield
    torch._dynamo.reset()
