"""Arguments that a call writes to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.behaviour.stateful import inputs, strided, twice_written
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate


def handed_on(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = x.clone()
    x.copy_(y)
    y.copy_(old * 2)
    return old, x + y


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[3:5].fill_(7)
    return x.sum()


def with_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, y, out=x)


def rounded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(mask > 0, -1.0).clamp_(-0.5, 0.5)
    return x.t()


def inplace_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x, inplace=True) + 1


# No schema says that these write.
def of_a_batch(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean[0], variance[0], training=True, momentum=0.3)


def of_instances(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x.T[None], mean[1], variance[2])


WRITERS = [
    *(twice_written, handed_on, through_a_view, with_out, rounded, inplace_relu),
    *(of_a_batch, of_instances),
]


def given(function: Callable[..., Any]) -> list[torch.Tensor]:
    return inputs(function.__code__.co_argcount, 3, 4)


def same_storage(results: Any, args: Any) -> list[list[bool]]:
    tensors = [*(results if isinstance(results, tuple) else (results,)), *args]
    starts = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[a == b for b in starts] for a in starts]


@pytest.mark.parametrize("function", WRITERS)
def test_arguments_are_written_as_in_eager(function: Callable[..., Any], no_grad: None):
    fast = decorate(function, strict=True)
    for _ in range(2):
        ours, theirs = given(function), given(function)
        versions = [tensor._version for tensor in ours]
        actual, expected = fast(*ours), function(*theirs)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(ours, theirs)
        assert same_storage(actual, ours) == same_storage(expected, theirs)
        changed = [not torch.equal(a, b) for a, b in zip(ours, given(function), strict=True)]
        assert [t._version > v for t, v in zip(ours, versions, strict=True)] == changed
    assert fast.cache_info().hits == 1


@pytest.mark.parametrize(
    ("size", "step", "runs_eager"), [(2, 2, False), (2, 3, True), (1, 5, True)]
)
def test_windows_are_written_as_in_eager(size: int, step: int, runs_eager: bool, no_grad: None):
    def function(x: torch.Tensor) -> torch.Tensor:
        x.unfold(0, size, step).mul_(2)
        return x + 1

    fast, (x,) = decorate(function), inputs(1, 8)
    with pytest.warns(TvmifyWarning, match="windows") if runs_eager else nullcontext():
        found = fast(y := x.clone())
    assert torch.equal(found, function(x))
    assert torch.equal(y, x)


@pytest.mark.parametrize(("start", "size"), [(0, 2), (0, 0), (3, 0)])
def test_out_is_resized_as_in_eager(start: int, size: int, no_grad: None):
    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.sum(x, 0, out=out[start:] if start else out)
        return x + 1

    x = torch.randn(3, 2)
    memory = [torch.zeros(8) for _ in range(2)]
    ours, theirs = (m[: start + size] for m in memory)
    with nullcontext() if size == 2 else pytest.warns(TvmifyWarning, match="changes the shape"):
        assert torch.equal(decorate(function)(x, ours), function(x, theirs))
    assert torch.equal(ours, theirs)
    assert torch.equal(*memory)


def test_strided_arguments_are_written_in_place(no_grad: None):
    fast = decorate(handed_on, strict=True)
    ours = [strided(x) for x in given(handed_on)]
    theirs = [strided(x) for x in given(handed_on)]
    torch.testing.assert_close(fast(*ours), handed_on(*theirs))
    torch.testing.assert_close([x._base for x in ours], [x._base for x in theirs])


def test_mutated_argument_is_returned_as_itself(no_grad: None):
    fast = decorate(twice_written, strict=True)
    (x,) = given(twice_written)
    assert fast(x) is x


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(3, 4)], ids=["itself", "view"])
def test_aliased_arguments_run_eager(view: Callable[..., Any], no_grad: None):
    fast = decorate(handed_on)
    fast(*given(handed_on))
    (ours,), (theirs,) = inputs(1, 3, 4), inputs(1, 3, 4)
    with pytest.warns(TvmifyWarning, match="shares memory"):
        actual = fast(ours, view(ours))
    torch.testing.assert_close(actual, handed_on(theirs, view(theirs)))
    torch.testing.assert_close(ours, theirs)


def test_unwritable_argument_is_refused_as_in_eager(no_grad: None):
    fast = decorate(twice_written)
    fast(*given(twice_written))
    with pytest.raises(RuntimeError):
        fast(torch.zeros(1, 4).expand(3, 4))
    with torch.inference_mode():
        x = torch.zeros(3, 4)
        fast(x.clone())
    with pytest.raises(RuntimeError):
        fast(x)


def test_weight_as_argument_runs_eager(no_grad: None):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * self.weight

    plain = Scaled().eval()
    fast = decorate(plain)
    fast(torch.zeros(3, 4))
    with pytest.warns(TvmifyWarning, match="shares memory"):
        assert fast(plain.weight).equal(torch.full((3, 4), 4.0))
    assert fast(torch.zeros(3, 4)).equal(torch.full((3, 4), 2.0))
