"""The description in an artifact, refusals, and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiler.programs import check, compiled, executed, target
from tvmify.artifact.results import Argument, Computed, Constant, StateTensor
from tvmify.artifact.writes import Write
from tvmify.compiler import compile
from tvmify.errors import BuildError, UnsupportedInput, UnsupportedOperator, UnsupportedTarget
from tvmify.target import Target


class Holder(nn.Module):
    """Returns its attribute and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("buffer", torch.randn(4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float, *, extra: dict[str, torch.Tensor]) -> Any:
        return {
            "argument": x,
            "extra": [extra["k"]],
            "clone": x.clone(),
            "weight": self.weight.view(3, 2),
            "buffer": self.buffer.clone(),
            "constant": torch.ones(3),
            "sum": (x * scale, None, 7, "text"),
            "twice": (x * scale).view(-1),
        }


def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(2, 3), 2.5), {"extra": {"k": torch.randn(2)}}


def test_results_of_every_kind():
    args, kwargs = call()
    artifact = compiled(Holder(), *args, **kwargs)
    assert Argument(0) in artifact.outputs
    assert Argument(2) in artifact.outputs
    assert {Constant(None), Constant(7), Constant("text")} <= set(artifact.outputs)
    assert (artifact.weights, artifact.state) == (("buffer",), ("weight",))
    assert artifact.inputs == (0,)
    with torch.no_grad():
        check(Holder(), *args, **kwargs)


def test_results_do_not_alias_program_memory():
    args, kwargs = call()
    module = Holder()
    artifact = compiled(module, *args, **kwargs)
    with torch.no_grad():
        result = executed(artifact, module, *args, **kwargs)
        for name in ("clone", "buffer", "constant"):
            result[name].fill_(float("nan"))
        assert result["weight"].data_ptr() == module.weight.data_ptr()
    assert not any(p.isnan().any() for p in (args[0], module.weight, module.buffer))
    again = executed(artifact, module, *args, **kwargs)
    assert torch.equal(again["constant"], torch.ones(3))


def test_stages_are_announced_in_order():
    stages: list[str] = []
    exported = torch.export.export(nn.ReLU(), (torch.randn(3),))
    report = compile(exported, target(), on_stage=stages.append).report
    assert stages == ["decompose", "import", "lower", "schedule", "build", "link", "release"]
    assert list(report["seconds"]) == stages[:-1]
    assert report["operators"] == {"aten.relu.default": 1}
    assert report["kernels"] == {"relu": "elementwise"}


def test_kernels_without_a_schedule_are_counted_and_run(monkeypatch: pytest.MonkeyPatch):
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0).exp()

    x = torch.randn(5)
    from tvmify.compiler import pipeline

    without = replace(pipeline.CPU, rules={})
    monkeypatch.setitem(pipeline._BACKENDS, "llvm", without)
    artifact = compiled(program, x)
    assert list(artifact.report["kernels"].values()) == ["unscheduled"] * 2
    assert artifact.report["unscheduled"] == 2
    torch.testing.assert_close(executed(artifact, program, x), program(x))


def test_every_unknown_operator_is_named():
    def program(x: torch.Tensor) -> Any:
        return x.to_sparse().to_dense()

    with pytest.raises(UnsupportedOperator) as refused:
        compiled(program, torch.randn(3, 3))
    assert refused.value.operators == (
        "aten._to_dense.default",
        "aten._to_sparse.default",
    )


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


def test_writes_are_reported():
    artifact = compiled(Counter(), torch.randn(3))
    assert (artifact.state, artifact.writes) == (("calls",), (Write(StateTensor(0), Computed(1)),))
    artifact = compiled(lambda x: x.add_(1), torch.randn(3))
    assert (artifact.outputs, artifact.writes) == (
        (Argument(0),),
        (Write(Argument(0), Computed(0)),),
    )
    assert not artifact.needs_contiguous


def test_constants_are_neither_written_nor_returned():
    held = torch.ones(3)
    for program in (lambda x: x + held.add_(1), lambda x: (x + 1, held)):
        with pytest.raises(UnsupportedOperator, match="closure"):
            compiled(program, torch.randn(3))


def test_crashing_dtypes_are_refused():
    with pytest.raises(UnsupportedInput, match="float8"):
        compiled(lambda x: x.clone(), torch.zeros(3, dtype=torch.float8_e4m3fn))


def test_a_program_without_work_is_refused():
    with pytest.raises(BuildError, match="computes no tensor"):
        compiled(lambda x: x, torch.randn(3))


def test_tvm_failure_names_stage_and_cause(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("not lowered\nTraceback of TVM")

    monkeypatch.setattr("tvmify.compiler.pipeline.lower", fail)
    exported = torch.export.export(nn.ReLU(), (torch.randn(3),))
    with pytest.raises(BuildError, match="stage 'lower': RuntimeError: not lowered") as failure:
        compile(exported, target())
    assert failure.value.__cause__ is not None
    assert "\n" not in str(failure.value)


def test_a_target_that_tvm_does_not_know_is_refused():
    exported = torch.export.export(nn.ReLU(), (torch.randn(3),))
    with pytest.raises(UnsupportedTarget, match="no such kind"):
        compile(exported, Target("no such kind"))


def test_a_program_without_inputs():
    check(lambda: torch.arange(5) + 1)
