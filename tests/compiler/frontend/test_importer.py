"""Converters that have a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.compiler.programs import compiled
from tvmify import tvmify
from tvmify.compiler.frontend.converters import CONVERTERS


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def fails(importer: Any, node: fx.Node) -> Any:
    raise IndexError("of the converter")


def misspells(importer: Any, node: fx.Node) -> Any:
    return importer.argument(node, "out_place")


@pytest.mark.parametrize(
    ("converter", "message"),
    [
        (fails, "IndexError: of the converter"),
        (misspells, "aten.relu.default has no argument 'out_place'"),
    ],
)
def test_failing_converter_is_an_error(
    inference: None,
    monkeypatch: pytest.MonkeyPatch,
    converter: Callable[..., Any],
    message: str,
) -> None:
    monkeypatch.setitem(CONVERTERS, "relu.default", converter)
    with pytest.raises(Exception, match=message):
        tvmify(Positive().eval(), strict=True, cache=False)(torch.ones(3))


def test_without_the_variable_pytorch_computes_what_a_converter_fails_at(
    inference: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(CONVERTERS, "relu.default", fails)
    monkeypatch.delenv("TVMIFY_STRICT_COMPILER")
    with caplog.at_level(logging.WARNING, logger="tvmify"):
        artifact = compiled(torch.relu, torch.ones(3))
    assert artifact.report["bridged"] == {"aten.relu.default": 1}
    (record,) = caplog.records
    assert record.getMessage() == "converter of aten.relu.default: IndexError: of the converter"
