"""Fixtures for the tests of saved files."""

from __future__ import annotations

import pytest
from torch import nn

from tests.saved.nets import Small


@pytest.fixture
def small() -> nn.Module:
    return Small().eval()
