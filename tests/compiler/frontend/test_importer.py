from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tvmify import tvmify
from tvmify.compiler.frontend.converters import CONVERTERS


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


@pytest.fixture(autouse=True)
def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a converter have a fault."""

    def fail(*_: object) -> None:
        raise IndexError("of the converter")

    monkeypatch.setitem(CONVERTERS, "relu.default", fail)


def test_failing_converter_is_an_error(inference: None) -> None:
    with pytest.raises(Exception, match="of the converter"):
        tvmify(Positive().eval(), strict=True, cache=False)(torch.ones(3))


def test_without_the_variable_pytorch_computes_what_a_converter_fails_at(
    inference: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TVMIFY_STRICT_COMPILER")
    x = torch.tensor([-1.0, 2.0])
    with caplog.at_level(logging.WARNING, logger="tvmify"):
        fast = tvmify(Positive().eval(), strict=True, cache=False)
        assert torch.equal(fast(x), torch.relu(x))
    (record,) = caplog.records
    assert record.getMessage() == "converter of aten.relu.default: IndexError: of the converter"
    assert "aten.relu.default" in str(fast.explain())
