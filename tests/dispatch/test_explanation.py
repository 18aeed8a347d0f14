from __future__ import annotations

from typing import Any

import pytest

from tvmify.dispatch.explanation import _report_lines


def test_kernels_are_counted_by_rule_and_without_one() -> None:
    report = {"kernels": {"a": "gru", "b": "unscheduled", "c": "gru"}, "unscheduled": 1}
    assert _report_lines(report) == [
        "    kernels: 3 (2 gru, 1 unscheduled)",
        "    without a schedule: 1",
    ]


@pytest.mark.parametrize(
    "report",
    [
        {"tuning": {}},
        {"tuning": {"workloads": "many", "measured": 1, "left": 0}},
        {"seconds": {"build": "long"}},
        {"seconds": {"build": None}},
    ],
)
def test_a_report_of_another_form_ends_no_explanation(report: dict[str, Any]) -> None:
    assert "cannot be read" in _report_lines(report)[0]
