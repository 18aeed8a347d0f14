from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import tvmify
from tests.dispatch.nets import Minus, Scaled, X
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate
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


def test_explain_reports_where_calls_ran() -> None:
    fast: Any = decorate(Scaled().eval())
    with torch.no_grad():
        fast(X)
    with pytest.warns(TvmifyWarning):
        fast(X.clone().requires_grad_())
    text = str(fast.explain())
    assert "runs compiled" in text
    assert "captured by: torchscript" in text
    assert "code: built" in text
    assert "runs in eager PyTorch: an input requires a gradient" in text
    assert "kernels:" in text


def test_explain_names_the_nearest_older_entry() -> None:
    fast: Any = decorate(Minus().eval())
    with torch.no_grad():
        fast(X, X)
        assert "nearest older entry" not in str(fast.explain())
        fast(X[:2], X[:2])
    text = str(fast.explain())
    assert text.count("nearest older entry") == 1
    assert "      inputs 0: shape [2, 4] → [3, 4]\n" in text
    again: Any = decorate(Minus().eval())
    with torch.no_grad():
        again(X, X)
    assert "nearest" not in str(again.explain())  # there was no miss
