"""Operator samples become programs for a GPU, or are refused, or fail."""

from __future__ import annotations

import pytest

from conformance.gpu_builds import builds
from conformance.operators import COMPILED, CRASHED, EAGER, Result
from tvmify.compiler.cuda import rules


def _results(*names: str) -> list[Result]:
    return [result for _, result in builds(2, frozenset(names), ["float32"], "sm_80")]


def test_samples_are_built_or_refused() -> None:
    built = _results("argmax", "block_diag", "eye", "narrow_copy")
    assert {result.outcome for result in built} == {COMPILED}
    assert {result.outcome for result in _results("nonzero")} == {EAGER}


def test_a_rule_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(rules.RULES["elementwise"], "schedule", schedule)
    result, _ = _results("exp")
    assert result.outcome == CRASHED and "a fault" in result.reason
