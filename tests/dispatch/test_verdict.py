"""Verdicts: eager PyTorch runs calls that it computes faster."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import tvmify
from tvmify.dispatch import load_or_build, verdict
from tvmify.dispatch.verdict import Verdict, compare, judge


@pytest.fixture(autouse=True)
def _comparing(monkeypatch):
    monkeypatch.setenv("TVMIFY_COMPARE", "1")


@pytest.fixture
def verdicts(monkeypatch):
    """The verdicts of comparisons, in order; a missing one is an error."""
    queue = []
    monkeypatch.setattr(verdict, "compare", lambda compiled, eager: queue.pop(0))
    return queue


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).relu()


def new(**options):
    return tvmify(Net().eval(), **options)


def test_compare_calls_both_sides_and_uses_the_shortest_times():
    calls = []
    times = compare(lambda: calls.append("compiled"), lambda: calls.append("eager"))
    assert calls.count("compiled") == calls.count("eager") > 1
    assert min(times) > 0


def test_a_surprising_verdict_is_measured_for_longer(monkeypatch):
    clock, slow = [0.0], [0.3] * 4  # something else keeps the machine busy at first
    monkeypatch.setattr(verdict, "perf_counter", lambda: clock[0])

    def compiled():
        clock[0] += slow.pop() if slow else 0.05

    def eager():
        clock[0] += 0.1

    assert Verdict(*compare(compiled, eager), 1).is_for_compiled


def test_compare_needs_no_gradients():
    modes = []
    compare(lambda: modes.append(torch.is_grad_enabled()), lambda: None)
    assert set(modes) == {False}


def test_a_call_on_a_gpu_is_over_when_the_gpu_is_done(monkeypatch):
    waits = []

    class Stream:
        def __init__(self, gpu: int) -> None:
            self.gpu = gpu

        def synchronize(self) -> None:
            waits.append(self.gpu)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    calls = []
    judge({}, lambda: calls.append(1), lambda: calls.append(2), gpu=3)
    assert len(waits) == len(calls) > 2 and set(waits) == {3}


def test_verdicts_are_per_way_to_run(verdicts):
    known = {}
    verdicts += [(2, 1), (1, 2)]
    plain = judge(known, str, str)
    graph = judge(known, str, str, graphs=True)
    assert plain == Verdict(2, 1, torch.get_num_threads())
    assert graph == Verdict(1, 2, torch.get_num_threads())
    assert len(known) == 2
    assert judge(known, str, str) == plain


def test_compiled_code_wins_ties():
    assert Verdict(1.0, 1.0, 2).is_for_compiled
    assert not Verdict(1.1, 1.0, 2).is_for_compiled


def test_the_faster_side_is_used_and_explained(verdicts):
    x = torch.randn(2, 4)
    verdicts += [(0.002, 0.001), (0.001, 0.002)]
    slower, faster = new(), new(cache=False)
    for net in slower, faster:
        load_or_build._LOADED.clear()
        torch.testing.assert_close(net(x), Net.forward(net, x))
    assert slower.cache_info().entries == 0
    assert "runs in eager PyTorch, which is faster here" in str(slower.explain())
    assert "2 ms compiled, 1 ms in eager" in str(slower.explain())
    assert faster.cache_info().entries == 1
    assert "1 ms compiled, 2 ms in eager" in str(faster.explain())


def test_slower_side_does_not_warn(verdicts):
    verdicts.append((2, 1))
    new()(torch.randn(2, 4))  # warnings are errors


def test_a_verdict_is_kept_on_disk(verdicts):
    x = torch.randn(2, 4)
    verdicts.append((2, 1))
    new()(x)
    load_or_build._LOADED.clear()
    again = new()
    again(x)
    assert again.cache_info().disk_hits == 1
    assert again.cache_info().builds == again.cache_info().entries == 0
    assert verdicts == []


def test_verdicts_are_per_thread_count(verdicts):
    x = torch.randn(2, 4)
    threads = torch.get_num_threads()
    verdicts += [(2, 1), (1, 2)]
    new()(x)
    try:
        torch.set_num_threads(threads + 1)
        other = new()
        other(x)
        assert other.cache_info().entries == 1
    finally:
        torch.set_num_threads(threads)
    first = new()
    first(x)
    assert first.cache_info().entries == 0
    assert verdicts == []


@pytest.mark.parametrize("options", [{"strict": True}, {"compare": False}])
def test_compiled_code_is_used_without_a_comparison(verdicts, options):
    net = new(**options)
    net(torch.randn(2, 4))
    assert net.cache_info().entries == 1


def test_invalid_input_raises_and_builds_once():
    net = tvmify(nn.Embedding(5, 2).eval())
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range in self"):
            net(torch.tensor([7]))
    assert net.cache_info().builds == 1
    net(torch.tensor([1]))


def test_gradients_still_flow_when_eager_is_faster(verdicts):
    verdicts.append((2, 1))
    net = new()
    net(torch.randn(2, 4)).sum().backward()
    assert net.linear.weight.grad is not None


def test_eager_warnings_appear_once() -> None:
    def eager() -> None:
        warnings.warn("of the user", stacklevel=1)

    with pytest.warns(UserWarning, match="of the user") as shown:
        judge({}, lambda: None, eager)
    assert len(shown) == 1


@pytest.mark.parametrize(
    "function",
    [lambda x: x.std(), lambda x: x - True, lambda x: x.lerp(x, 0.5)],
    ids=["std", "sub", "lerp"],
)
def test_eager_only_error_is_raised(function):
    """The programs that torch.export records for these calls compute integers."""
    fast = tvmify(function, cache=False)
    with pytest.raises(Exception) as expected:
        function(torch.arange(4))
    for _ in range(2):
        with pytest.raises(type(expected.value)) as raised:
            fast(torch.arange(4))
        assert str(raised.value) == str(expected.value)
    assert f"eager PyTorch raises {type(expected.value).__name__}" in fast.explain()


def test_eager_out_of_memory_keeps_compiled_code(monkeypatch):
    def short_of_memory(compiled, eager):
        eager()

    def eager():
        raise MemoryError

    monkeypatch.setattr(verdict, "compare", short_of_memory)
    assert judge({}, lambda: None, eager) is None
