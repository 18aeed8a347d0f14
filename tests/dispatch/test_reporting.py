"""The reason why calls run in eager is reported once, and only for calls that return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tvmify import NotCompiled, TvmifyWarning
from tvmify import tvmify as decorate

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Checked(nn.Module):
    """Raises an error of the user, by control flow that depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 2).any()):
            raise ValueError("too large")
        return x.relu()


def test_eager_errors_are_raised_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    fast: Any = decorate(Checked().eval(), cache=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="too large"):
            fast(X + 5)
    linear: Any = decorate(nn.Linear(4, 4).eval(), cache=False)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(torch.ones(3, 5))
    assert not recwarn.list
    torch.testing.assert_close(linear(X), linear(X))
    assert linear.cache_info().builds == 1


def test_successful_call_warns_once() -> None:
    fast: Any = decorate(Checked().eval(), cache=False)
    with pytest.raises(ValueError, match="too large"):
        fast(X + 5)
    with pytest.warns(TvmifyWarning, match="runs in eager PyTorch") as said:
        for _ in range(2):
            torch.testing.assert_close(fast(X), X.relu())
    assert len(said) == 1


def test_strict_refuses_before_anything_runs() -> None:
    ran: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        ran.append(int(x.sum()))
        return x

    with pytest.raises(NotCompiled):
        decorate(forward, cache=False, strict=True)(X)
    assert not ran


_FAILURES: list[str] = []


@torch.library.custom_op("tvmify_tests::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    if _FAILURES:
        raise ValueError(_FAILURES.pop())
    return x + 1


@fails.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_the_error_of_compiled_code_is_named_if_eager_raises_none(inference: None) -> None:
    net = decorate(lambda x: torch.ops.tvmify_tests.fails(x).sin(), compare=False)
    x = torch.randn(2, 3)
    expected = net(x)
    _FAILURES.append("out of paper")
    with pytest.warns(TvmifyWarning, match="eager PyTorch does not: .*out of paper"):
        torch.testing.assert_close(net(x), expected)
    (explained,) = net.explain().signatures
    assert explained.runs == "compiled" and "out of paper" in explained.failure
    text = str(net.explain())
    assert "runs compiled, but failed in a call, which ran in eager PyTorch\n" in text
    assert "\n      compiled code raised" in text
