from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import tvmify
from tvmify.dispatch.explanation import ExplainedSignature


def lines(report: dict[str, Any]) -> list[str]:
    return [*ExplainedSignature(signature="(x)", runs="compiled", report=report).lines()][2:]


def test_kernels_are_counted_by_rule_and_without_one() -> None:
    report = {"kernels": {"a": "gru", "b": "unscheduled", "c": "gru"}, "unscheduled": 1}
    assert lines(report) == [
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
def test_unknown_report_format_is_tolerated(report: dict[str, Any]) -> None:
    assert "cannot be read" in lines(report)[0]


def clip(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x * 2, max=1.0)


def branch(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) + 1
    if y.sum() > 0:
        y = torch.sigmoid(y) * 2
    return y


@pytest.mark.usefixtures("inference")
def test_data_and_text_agree() -> None:
    clipped = tvmify.tvmify(clip)
    clipped(torch.randn(2))
    explanation = clipped.explain()
    (subject,) = explanation.methods
    (signature,) = explanation.signatures
    assert subject.info == clipped.cache_info() and subject.info.builds == 1
    assert (signature.signature, signature.runs) == ("(float32[2] cpu)", "compiled")
    assert (signature.captured_by, signature.source) == ("torchscript", "built")
    assert "kernels" in signature.report
    text = str(explanation)
    assert repr(explanation) == text
    assert f"  {signature.signature}\n    runs compiled\n" in text
    assert f"    key: {signature.key}\n" in text
    assert "runs compiled" in explanation and copy.deepcopy(explanation).methods == (subject,)
    with pytest.raises(FrozenInstanceError):
        signature.runs = "eager"  # type: ignore[misc]


@pytest.mark.usefixtures("inference")
def test_shapes_are_counted_for_each_program() -> None:
    fast = tvmify.tvmify(clip, dynamic=True)
    for size in (3, 5, 9, 5, 3):
        fast(torch.randn(size))
    assert fast.cache_info().builds == 1
    (signature,) = fast.explain().signatures
    assert signature.served == 3
    assert "    has served 3 shapes so far, serves sizes with\n" in str(fast.explain())


@pytest.mark.usefixtures("inference")
def test_a_reason_to_run_in_eager() -> None:
    fast = tvmify.tvmify(lambda x: x.to_sparse())
    with pytest.warns(tvmify.TvmifyWarning):
        fast(torch.eye(2))
    explanation = fast.explain()
    (signature,) = explanation.signatures
    assert signature.runs == "eager" and signature.reason and signature.next_step
    assert f"    runs in eager PyTorch: {signature.reason}\n" in str(explanation)


@pytest.mark.usefixtures("inference")
def test_regions_are_parts() -> None:
    fast = tvmify.tvmify(branch)
    fast(torch.ones(3))
    (subject,) = fast.explain().methods
    assert [signature.runs for signature in subject.signatures] == ["regions"]
    assert subject.parts and all(part.operators for part in subject.parts)
    compiled = {s.runs for part in subject.parts for s in part.signatures}
    assert compiled <= {"compiled", "eager"}


def test_notebook_output_is_escaped() -> None:
    fast = tvmify.tvmify(lambda x: x)  # its name has "<lambda>"
    shown = fast.explain()._repr_html_()
    assert shown.startswith("<pre>") and "&lt;lambda&gt;: 0 built" in shown
