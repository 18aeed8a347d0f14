from __future__ import annotations

from typing import Any

import pytest

from tvmify.explanation import _report_lines


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
