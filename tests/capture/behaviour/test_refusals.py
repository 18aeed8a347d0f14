"""Modules that cannot be one program are refused, with the place and the next step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture import nets
from tvmify import tvmify
from tvmify.capture import capture
from tvmify.errors import CaptureError, UnsupportedOperator


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nets.BranchOnValues(), "if x.sum() > 0"),
        (nets.LoopOnValues(), "while x.sum() < 100"),
        (nets.NumberFromValues(), "x.sum().item()"),
        (nets.ShapeFromValues(), "depends on the values"),
        (nets.SplitByValues(), "depends on the values"),
        (nets.UnscriptableBranch(), "nets.py"),
        (nets.ChecksArguments(), "validate_args=False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_value_dependent_program_is_refused(
    module: nn.Module, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.rand(3)
    with caplog.at_level(logging.WARNING), pytest.raises(CaptureError) as caught:
        capture(module, (x,), {}).export((x,), {})
    assert words in str(caught.value)
    assert not caplog.records


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nets.Counter(), "calls"),
        (nets.UnscriptableCounter(), "calls"),
        (nets.Appender(), "changes a list"),
        (nets.Accumulator(), "attribute total"),
        (nets.UnscriptableAccumulator(), "total"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_program_replacing_its_state_is_refused(module: nn.Module, words: str) -> None:
    x = torch.rand(3)
    with pytest.raises(UnsupportedOperator, match=words):
        capture(module, (x,), {}).export((x,), {})
    assert getattr(module, "calls", 0) == 0
    assert len(getattr(module, "seen", [0])) == 1
    assert not getattr(module, "total", x * 0).any()


class Seeding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(42)
        return x + torch.rand(3)


def test_seeding_forward_is_refused() -> None:
    """The seed would be set once, during the recording, but not in the program."""
    with pytest.raises(CaptureError, match=r"manual_seed.*before the call"):
        capture(Seeding().eval(), (torch.rand(3),), {})
    torch.manual_seed(1)  # allowed here


def test_argument_list_is_not_mutated() -> None:
    def grow(items: list[Tensor]) -> Tensor:
        items.append(items[0])
        return items[0] + 1

    items = [torch.rand(3)]
    with pytest.raises(UnsupportedOperator, match="an argument or an attribute"):
        capture(torch.jit.script(grow), (items,), {}).export((items,), {})
    assert len(items) == 1


def test_the_reason_is_the_same_at_every_attempt() -> None:
    # at a second attempt, torch says that it cannot redefine the method
    reasons = {capture(nets.Starred(nn.ReLU()), (torch.rand(3),), {}).reason for _ in range(3)}
    assert len(reasons) == 1
    (reason,) = reasons
    assert reason is not None and "variable number of arguments" in reason and "nets.py" in reason


def test_results_of_unknown_types_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"torch\.device"):
        capture(lambda x: (x, x.device), (torch.rand(3),), {})


def test_error_of_the_module_is_named() -> None:
    program = capture(nets.Raises(), (torch.rand(2, 2),), {})
    with pytest.raises(CaptureError, match="two dimensions, please"):
        program.export((torch.rand(2),), {})


def test_is_scripting_check_prevents_scripting() -> None:
    class Different(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.jit.is_scripting():
                return x.sum()
            return x

    program = capture(Different(), (torch.rand(3),), {})
    assert program.method == "export"
    assert "is_scripting" in (program.reason or "")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensor_made_from_a_number_is_not_a_write(mode: Any) -> None:
    with mode():
        program = capture(lambda *x: x[0] + torch.tensor(0.5), (torch.ones(2),), {})
    assert program.method == "export"


def test_failed_export_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """torch would print the whole graph so far."""

    def split(x: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        return torch.tensor_split(x, parts)

    with pytest.raises(CaptureError):
        capture(split, (torch.rand(4), torch.tensor(2)), {})
    assert capfd.readouterr() == ("", "")


def test_raising_call_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """torch would log the traceback of an operator that fails on fake tensors."""
    net = tvmify(nn.Linear(4, 2).eval())
    with (
        torch.no_grad(),
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match="mat1 and mat2"),
    ):
        net(torch.ones(3, 5))
    assert not caplog.records


def test_reason_names_user_code_only() -> None:
    with pytest.raises(CaptureError, match=r"depends on the values of tensors \(no source known\)"):
        capture(lambda x, mask: x[mask], (torch.rand(4), torch.ones(4, dtype=torch.bool)), {})
