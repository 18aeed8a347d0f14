"""Operator samples become programs for a GPU, or are refused, or fail."""

from __future__ import annotations

import pytest

from conformance.gpu_builds import BUILT, FAILED, REFUSED, builds
from tvmify.compiler.cuda import rules


def _outcomes(*names: str) -> list[str]:
    return [outcome for _, outcome in builds(2, frozenset(names), ["float32"], "sm_80")]


def test_samples_are_built_or_refused() -> None:
    assert set(_outcomes("argmax", "block_diag", "eye", "narrow_copy")) == {BUILT}
    assert set(_outcomes("nonzero")) == {REFUSED}


def test_a_rule_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(rules.RULES["elementwise"], "schedule", schedule)
    outcome, _ = _outcomes("exp")
    assert outcome.startswith(FAILED) and "a fault" in outcome
