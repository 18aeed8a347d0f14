"""The decision to use compiled code: its calls on a GPU, and PyTorch's settings meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tvmify.dispatch.acceptance import check_results
from tvmify.errors import BuildError


class Program:
    """A fake program for a GPU that records whether cuDNN timed its algorithms in each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verdicts: dict[str, Any]) -> None:
        self.benchmarked: list[bool] = []
        self.run = SimpleNamespace(obstacle=lambda leaves: None)
        artifact = SimpleNamespace(verdicts=verdicts, writes=())
        self.executor = SimpleNamespace(artifact=artifact)
        monkeypatch.setattr("tvmify.dispatch.acceptance._result", self.result)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: torch.get_rng_state())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: None)

    def gpu_of(self, leaves: tuple[Any, ...]) -> int:
        return 0

    def result(self, compiled: Any, leaves: tuple[Any, ...]) -> torch.Tensor:
        self.benchmarked.append(torch.backends.cudnn.benchmark)
        return leaves[0] * 2


@pytest.mark.parametrize("verdicts", [{}, {"driver": "known"}], ids=["built", "loaded"])
@pytest.mark.parametrize("factor", [2, 3])
def test_cudnn_times_its_algorithms_in_the_first_call_if_tuned(
    verdicts: dict[str, Any], factor: int, monkeypatch: pytest.MonkeyPatch
):
    leaves = (torch.ones(3),)
    eager = lambda: leaves[0] * factor  # noqa: E731
    program: Any = Program(monkeypatch, verdicts)
    if verdicts or factor == 2:
        check_results(program, leaves, eager, is_tuned=True)
    else:
        with pytest.raises(BuildError, match="differ from those of eager"):
            check_results(program, leaves, eager, is_tuned=True)
    assert program.benchmarked == [True]
    assert not torch.backends.cudnn.benchmark


def test_cudnn_settings_are_kept_without_tuning(monkeypatch: pytest.MonkeyPatch):
    program: Any = Program(monkeypatch, {})
    check_results(program, (torch.ones(3),), lambda: 2 * torch.ones(3), is_tuned=False)
    assert program.benchmarked == [False]
    known: Any = Program(monkeypatch, {"driver": "known"})
    check_results(known, (torch.ones(3),), lambda: 2 * torch.ones(3), is_tuned=False)
    assert known.benchmarked == []
