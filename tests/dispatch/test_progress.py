from __future__ import annotations

import io
import sys

import pytest
import torch

from tests.dispatch.nets import Minus, X
from tvmify import tvmify as decorate
from tvmify.dispatch.progress import Stages
from tvmify.options import CompileOptions


class _Gone(io.StringIO):
    """A closed terminal, or a pipe without a reader."""

    def __init__(self, error: OSError | ValueError) -> None:
        super().__init__()
        self._error = error

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise self._error


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich only draws on terminals


def test_stages_are_drawn(capsys: pytest.CaptureFixture[str]):
    with Stages("net", visible=True) as stages:
        stages.begin("tune")
        stages.advance(3, 8)
    assert "tune" in (drawn := capsys.readouterr().err)
    assert "3/8" in drawn
    assert list(stages.seconds) == ["tune"]


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), BrokenPipeError(), ValueError("closed")]
)
def test_a_terminal_that_is_gone_does_not_fail_a_call(
    monkeypatch: pytest.MonkeyPatch, error: OSError | ValueError
):
    monkeypatch.setattr(sys, "stderr", _Gone(error))
    with Stages("net", visible=True) as stages:
        stages.begin("tune")
        stages.advance(3, 8)
    assert list(stages.seconds) == ["tune"]


def test_other_output_is_not_redirected(capsys: pytest.CaptureFixture[str]):
    with Stages("net", visible=True) as stages:
        stages.begin("tune")
        sys.stdout.write("a result\n")
    shown = capsys.readouterr()
    assert shown.out == "a result\n"
    assert "a result" not in shown.err


def test_progress_is_not_shown_on_a_closed_stream(monkeypatch: pytest.MonkeyPatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert not CompileOptions().shows_progress()


def test_progress_is_shown_only_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        decorate(Minus().eval(), cache=False)(X[:1], X[:1])
    assert capfd.readouterr().err == ""
