"""Whether compiled code agrees with eager PyTorch, and what happens if it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tvmify import BuildError, NotCompiled
from tvmify.dispatch import acceptance, outcome
from tvmify.dispatch.agreement import check_draws, computes_the_same
from tvmify.dispatch.attempt import Attempt
from tvmify.dispatch.outcome import Compiled


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_the_same_and_another_branch_is_not(dtype: torch.dtype):
    want = torch.randn(64, dtype=torch.float64)
    got = want.to(dtype)
    assert computes_the_same(lambda: [got.clone()], lambda: [want.to(torch.float16).to(dtype)])
    assert not computes_the_same(lambda: [got.flip(0)], lambda: [got])
    assert not computes_the_same(lambda: [got * 1.2], lambda: [got])


def test_shape_dtype_number_and_errors_count():
    ones = torch.ones(4)
    assert not computes_the_same(lambda: ones, ones.double)
    assert not computes_the_same(lambda: ones, lambda: ones[None])
    assert not computes_the_same(lambda: ones, lambda: (ones, ones))
    assert not computes_the_same(lambda: 1 / 0, lambda: ones)
    nans = ones * float("nan")
    assert computes_the_same(lambda: nans, lambda: nans) and not computes_the_same(
        lambda: ones, lambda: nans
    )


def test_integers_and_bools_are_compared():
    least = torch.tensor([torch.iinfo(torch.int32).min, 0], dtype=torch.int32)
    assert computes_the_same(least.clone, lambda: least)
    mask = torch.tensor([True, False])
    assert computes_the_same(mask.clone, lambda: mask)
    assert not computes_the_same(mask.logical_not, lambda: mask)


def test_both_sides_share_random_state_privately():
    torch.manual_seed(1)
    assert computes_the_same(lambda: torch.rand(8), lambda: torch.rand(8))
    after = torch.rand(8)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(8))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the dispatcher treat tensors as if they were on a GPU."""
    monkeypatch.setattr(Compiled, "gpu_of", lambda *_: 0)
    compare = lambda run, eager, _: computes_the_same(run, eager)  # noqa: E731
    monkeypatch.setattr(acceptance, "computes_the_same", compare)


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Attempt._start

    class Wrong:
        def __init__(self, call: Any) -> None:
            self._call, self.obstacle = call, call.obstacle

        def __call__(self, leaves: Any) -> Any:
            return self._call(leaves) + 1

    monkeypatch.setattr(Attempt, "_start", lambda *arguments: Wrong(start(*arguments)))


@pytest.mark.usefixtures("on_a_gpu")
def test_wrong_gpu_code_is_not_used(monkeypatch: pytest.MonkeyPatch):
    wrong(monkeypatch)
    net = tvmify.tvmify(Doubled().eval())
    with pytest.warns(tvmify.TvmifyWarning, match="differ from those of eager .* Please report"):
        assert torch.equal(net(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(net(torch.ones(3)), torch.full((3,), 2.0))
    assert "differ from those of eager" in str(net.explain())
    with pytest.raises(BuildError, match="Please report"):
        tvmify.tvmify(Doubled().eval(), strict=True)(torch.ones(3))


@pytest.mark.usefixtures("on_a_gpu")
def test_correct_gpu_code_is_used():
    net = tvmify.tvmify(Doubled().eval(), strict=True)
    assert torch.equal(net(torch.ones(3)), torch.full((3,), 2.0))
    assert "runs compiled" in str(net.explain())


def test_code_for_the_cpu_is_not_compared_for_that(monkeypatch: pytest.MonkeyPatch):
    wrong(monkeypatch)
    net = tvmify.tvmify(Doubled().eval())
    assert torch.equal(net(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.usefixtures("on_a_gpu")
def test_out_of_gpu_memory_during_comparison_runs_eager(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(acceptance, "computes_the_same", full)
    net = tvmify.tvmify(Doubled().eval())
    with pytest.warns(tvmify.TvmifyWarning, match="lacks the memory"):
        assert torch.equal(net(torch.ones(3)), torch.full((3,), 2.0))


def test_calls_under_graph_capture_do_not_synchronize(monkeypatch: pytest.MonkeyPatch):
    net = tvmify.tvmify(nn.Linear(4, 4).eval())
    x = torch.randn(2, 4)
    monkeypatch.setattr(outcome, "is_capturing", lambda: True)
    with torch.no_grad(), pytest.warns(tvmify.TvmifyWarning, match="CUDA graph is being captured"):
        net(x)
    assert net.cache_info().builds == net.cache_info().disk_hits == 0
    monkeypatch.setattr(outcome, "is_capturing", lambda: False)
    with torch.no_grad():
        net(x)
        assert net.cache_info().entries == 1
        net.bias.zero_()
        monkeypatch.setattr(outcome, "is_capturing", lambda: True)
        torch.testing.assert_close(net(x), x @ net.weight.T)  # in eager: nothing is packed again
        monkeypatch.setattr(outcome, "is_capturing", lambda: False)
        torch.testing.assert_close(net(x), x @ net.weight.T)


def test_check_draws_allows_a_draw_of_another_thread() -> None:
    x = torch.zeros(3)
    runs: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        runs.append(x)
        if len(runs) == 1:
            torch.rand(1)  # as another thread may
        return x

    check_draws(run, lambda: x, None, differentiable=False)


def test_check_draws_refuses_extra_draws() -> None:
    x = torch.zeros(3)
    with pytest.raises(NotCompiled, match="random numbers"):
        check_draws(lambda: x + torch.rand(3), lambda: x, None, differentiable=False)


def test_elements_in_another_order_get_the_draws_of_eager() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x) + torch.rand_like(x)) * 2

    fast = tvmify.tvmify(noisy, strict=True)
    x = torch.ones(2, 3, 4)
    for transposed, runs in (x, True), (x.transpose(0, 1).contiguous().transpose(0, 1), False):
        torch.manual_seed(0)
        want = noisy(transposed)
        torch.manual_seed(0)
        if runs:
            assert torch.equal(fast(transposed), want)
        else:
            with pytest.raises(NotCompiled, match="not contiguous"):
                fast(transposed)
