"""What the importer offers to converters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import fx

from tests.compiler.programs import compiled
from tvmify.compiler.frontend.converters import CONVERTERS


def test_arguments_that_an_operator_lacks_are_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def misspelt(importer: Any, node: fx.Node) -> Any:
        return importer.argument(node, "keep_dim")

    monkeypatch.setitem(CONVERTERS, "amax.default", misspelt)
    with caplog.at_level(logging.DEBUG):
        artifact = compiled(lambda x: x.amax(0) * 2, torch.randn(3, 4))
    assert artifact.report["bridged"]
    assert "aten.amax.default has no argument 'keep_dim'" in caplog.text
