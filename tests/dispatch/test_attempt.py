"""The log of a miss: its key, text by text, its stages, and its outcome."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import tvmify as decorate

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_key_entries_and_stages_are_logged_not_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], inference: None
) -> None:
    net: Any = decorate(nn.Linear(4, 4).eval(), progress=False)
    with caplog.at_level(logging.DEBUG, logger="tvmify"):
        net(X)
        logged = caplog.text
        caplog.clear()
        net(X)
        assert not caplog.records  # a hit logs nothing
    assert capfd.readouterr() == ("", "")
    (key,) = (line.split()[-1] for line in str(net.explain()).splitlines() if "key: " in line)
    assert f"Linear: key {key}" in logged
    assert "Linear: key entry 'program' has hash" in logged
    assert "Linear: key entry 'target' has hash" in logged
    assert all(f"Linear: stage '{name}' took" in logged for name in net.cache_info().seconds)
    assert "Linear: (float32[3, 4] cpu): compiled" in logged


def test_why_a_call_runs_in_eager_is_logged(
    caplog: pytest.LogCaptureFixture, inference: None
) -> None:
    net: Any = decorate(nn.Linear(4, 4).train())
    with caplog.at_level(logging.DEBUG, logger="tvmify"), pytest.warns(UserWarning):
        net(X)
    assert "eager the module is in training mode" in caplog.text
