"""Calls whose program is in no cache."""

from __future__ import annotations

import gc
import pickle
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.threads import together
from tvmify import CacheMiss, NotCompiled, OptionError, TvmifyWarning, compiler
from tvmify import tvmify as decorate
from tvmify.dispatch import attempt, load_or_build, on_miss
from tvmify.dispatch.building import background
from tvmify.dispatch.building.background import Job, Worker
from tvmify.dispatch.work import Work
from tvmify.errors import warn

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale * times


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_miss, "_jobs", weakref.WeakValueDictionary())


class OnDemand(Worker):
    """A worker that runs jobs on request, in the thread of the test."""

    def submit(self, job: Job) -> bool:
        if self.has_room():
            self._jobs.append(weakref.ref(job))
            return True
        return False

    def work(self) -> int:
        """Run the waiting jobs; return their number."""
        jobs = [job for job in (self._jobs.popleft()() for _ in range(len(self._jobs))) if job]
        for job in jobs:
            job.run(lambda: None)
        return len(jobs)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, inference: None) -> OnDemand:
    worker = OnDemand()
    monkeypatch.setattr(background, "worker", worker)
    return worker


@pytest.fixture
def real_worker(monkeypatch: pytest.MonkeyPatch, inference: None) -> Iterator[Worker]:
    worker = Worker()
    monkeypatch.setattr(background, "worker", worker)
    yield worker
    worker.stop()


def assert_same(fast: Any, x: torch.Tensor = X, *args: Any) -> None:
    assert torch.allclose(fast(x, *args), Net.forward(fast, x, *args), atol=1e-5)


# ---------------------------------------------------------------------------------- background


@pytest.mark.parametrize("on_miss", ["build", "background"])
def test_captures_and_foreground_builds_pause_garbage_collection(
    on_miss: str, worker: OnDemand, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, bool] = {}

    def watch(place: Any, name: str) -> None:
        function = getattr(place, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen[name] = gc.isenabled()
            return function(*args, **options)

        monkeypatch.setattr(place, name, watched)

    watch(attempt, "capture")
    watch(compiler, "compile")
    fast = decorate(Net().eval(), on_miss=on_miss, cache=False)
    fast(X)
    worker.work()
    assert seen == {"capture": False, "compile": on_miss == "background"}
    assert gc.isenabled()


def test_a_call_runs_eager_until_the_program_is_there(worker: OnDemand) -> None:
    net = Net().eval()
    fast: Any = decorate(net, on_miss="background")
    for _ in range(3):
        assert torch.equal(fast(X), net(X))  # without a warning
    assert "it is being built in the background" in str(fast.explain())
    assert fast.cache_info().builds == fast.cache_info().entries == 0
    assert worker.work() == 1
    assert torch.allclose(fast(X), net(X))
    info = fast.cache_info()
    assert (info.builds, info.entries) == (1, 1)
    assert "runs compiled" in str(fast.explain())
    assert "being built" not in str(fast.explain())


def test_the_next_process_loads_it(worker: OnDemand, monkeypatch: pytest.MonkeyPatch) -> None:
    decorate(Net().eval(), on_miss="background")(X)
    assert worker.work() == 0  # no longer needed
    fast = decorate(Net().eval(), on_miss="background")
    fast(X)
    worker.work()
    del fast  # it was not called again
    gc.collect()
    monkeypatch.setattr(load_or_build, "_LOADED", weakref.WeakValueDictionary())
    other: Any = decorate(Net().eval(), on_miss="background")
    other(X)
    assert other.cache_info().disk_hits == 1
    assert worker.work() == 0


def test_instances_wait_for_one_build(worker: OnDemand) -> None:
    nets: list[Any] = [decorate(Net().eval(), on_miss="background", cache=False) for _ in range(3)]
    for net in nets:
        net(X)
    assert worker.work() == 1
    results = [net(X) for net in nets]
    assert not torch.equal(results[0], results[1])
    assert all(net.cache_info().entries == 1 for net in nets)
    assert worker.work() == 0


def test_a_failed_build_is_the_reason(
    worker: OnDemand, monkeypatch: pytest.MonkeyPatch, cache_directory: Any
) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    with monkeypatch.context() as patch:
        patch.setattr("tvmify.compiler.compile", lambda *_, **__: [].pop())
        worker.work()
    with pytest.warns(TvmifyWarning, match="background failed: IndexError: pop from empty"):
        fast(X)
    assert "IndexError" in str(fast.explain())
    fast(X)
    assert worker.work() == 0
    fast.refresh()
    fast(X)
    worker.work()
    fast(X)
    assert fast.cache_info().entries == 1


def test_unsupported_module_warns(worker: OnDemand) -> None:
    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: int(x.sum() > 0)]

    fast: Any = decorate(Counted().eval(), on_miss="background")
    with pytest.warns(TvmifyWarning, match="read from a tensor's values"):
        for _ in range(3):
            assert torch.equal(fast(X), X[: int(X.sum() > 0)])
            worker.work()


def test_refresh_cancels_pending_builds(worker: OnDemand) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    fast.refresh()
    assert worker.work() == 0
    assert_same(fast)
    assert worker.work() == 1
    assert_same(fast)
    assert fast.cache_info().entries == 1


def test_module_changed_during_build_gets_its_own_program(worker: OnDemand) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    fast.scale = 5.0
    assert_same(fast)
    assert worker.work() == 2
    assert_same(fast)
    fast.scale = 2.0
    assert_same(fast)
    assert fast.cache_info().builds == 2


def test_weights_changed_during_build_take_effect(worker: OnDemand) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    fast.load_state_dict(Net().state_dict())
    assert worker.work() == 1
    assert_same(fast)
    assert fast.cache_info().entries == 1
    fast.linear = nn.Linear(4, 6)
    assert fast(X).shape == (3, 6)


def test_training_mode_during_build_runs_eager(worker: OnDemand) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    fast.train()
    with pytest.warns(TvmifyWarning, match="in training mode"):
        fast(X)
    worker.work()
    fast(X)
    assert fast.cache_info().entries == 0
    fast.eval()
    assert_same(fast)
    assert fast.cache_info().entries == 1


def test_deleted_module_cancels_its_build(worker: OnDemand) -> None:
    net = Net().eval()
    weight = weakref.ref(net.linear.weight)
    fast: Any = decorate(net, on_miss="background")
    fast(X)
    gc.collect()
    del net, fast
    gc.collect()  # frees objects of torch.jit
    assert weight() is None
    assert worker.work() == 0


def test_modes_changed_during_build_are_not_built_for(worker: OnDemand) -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(3, 1)

    fast: Any = decorate(Filled().eval(), on_miss="background")
    fast(X)
    torch.set_default_dtype(torch.float64)
    try:
        assert worker.work() == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert fast(X).dtype == torch.float32
    assert worker.work() == 1
    assert fast(X).dtype == torch.float32
    assert fast.cache_info().builds == 1


def test_build_under_changed_modes_is_not_stored(
    worker: OnDemand, monkeypatch: pytest.MonkeyPatch, cache_directory: Any
) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    build = Work.build

    def disturbed(*args: Any) -> Any:
        artifact = build(*args)
        torch.set_default_dtype(torch.float64)  # as another thread might
        return artifact

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Work, "build", disturbed)
            fast(X)
            assert worker.work() == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert not [path for path in cache_directory.glob("*") if len(path.name) == 64]
    assert_same(fast)
    assert worker.work() == 1
    assert_same(fast)
    assert fast.cache_info().entries == 1


def test_autocast_holds_for_the_build(worker: OnDemand) -> None:
    with torch.inference_mode(False), torch.no_grad():
        fast: Any = decorate(Net().eval(), on_miss="background")
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(X).dtype == torch.bfloat16
        worker.work()
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(X).dtype == torch.bfloat16
        assert fast(X).dtype == torch.float32
    assert fast.cache_info().entries == 1


def test_background_builds_keep_floats_as_arguments(worker: OnDemand) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background", cache=False)
    for times in (2.0, 3.0):
        assert_same(fast, X, times)
    assert worker.work() == 1
    for times in (2.0, 3.0, 4.0):
        assert_same(fast, X, times)
    assert fast.cache_info().builds == 1


def test_branching_float_is_specialized(worker: OnDemand) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor, limit: float) -> torch.Tensor:
            return x * 2 if limit > 1 else x + 3

    fast: Any = decorate(Branching().eval(), on_miss="background", cache=False)
    for _ in range(4):
        assert torch.equal(fast(X, 2.0), X * 2)
        assert torch.equal(fast(X, 0.5), X + 3)
        worker.work()
    assert fast.cache_info().entries == 2
    assert fast.cache_info().builds == 2


def test_regions_build_in_the_background(worker: OnDemand) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x)) * 2 + 1
            if bool(x.sum() > 0):
                x = torch.tanh(self.b(x)) * 3 + 2
            return x

    net = Flow().eval()
    fast: Any = decorate(net, on_miss="background")
    for _ in range(4):
        assert torch.allclose(fast(X), net(X), atol=1e-5)
        worker.work()
    assert fast.cache_info().builds == fast.cache_info().entries == 2


def test_buffers_changed_during_build(worker: OnDemand) -> None:
    class Counter(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    with torch.inference_mode(False), torch.no_grad():
        fast: Any = decorate(Counter().eval(), on_miss="background", cache=False)
        for call in range(1, 8):
            assert torch.equal(fast(X), X * call)
            worker.work()
    assert fast.cache_info().entries == 1


def test_full_queue_retries_later(monkeypatch: pytest.MonkeyPatch, inference) -> None:
    worker = OnDemand(most=1)
    monkeypatch.setattr(background, "worker", worker)
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    with pytest.warns(TvmifyWarning, match="the build queue is full"):
        for _ in range(2):
            assert_same(fast, X[:1])
    assert "the build queue is full" in str(fast.explain())
    assert worker.work() == 1
    assert_same(fast, X[:1])
    assert worker.work() == 1
    assert_same(fast, X[:1])
    assert fast.cache_info().entries == 1


def test_warm_up_always_waits(worker: OnDemand) -> None:
    fast: Any = decorate(Net().eval(), on_miss="background")
    fast(X)
    fast.warmup([(3, 4)])
    assert fast.cache_info().builds == 1
    assert_same(fast)


def test_threads_call_while_the_worker_builds(real_worker: Worker) -> None:
    net = Net().eval()
    want = net(X)
    fast: Any = decorate(net, on_miss="background")
    end = time.monotonic() + 60

    def call() -> None:
        with torch.inference_mode():
            while not fast.cache_info().entries:
                torch.testing.assert_close(fast(X), want, rtol=1e-5, atol=1e-5)
                assert time.monotonic() < end

    together([call] * 4)
    assert fast.cache_info().builds == 1


def test_warning_as_error_does_not_end_in_eager(
    inference: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_DIR", "/dev/null/warned")
    fast: Any = decorate(Net().eval())
    with pytest.raises(TvmifyWarning, match="/dev/null/warned cannot be accessed"):
        fast(X)
    assert_same(fast)
    assert fast.cache_info().builds == 1
    job = Job(lambda _: warn("nobody waits for it"))
    job.run(lambda: None)
    assert job.is_over and job.result is job.error is None
    assert "nobody waits for it" in caplog.text


# -------------------------------------------------------------------------------- eager, error


def test_on_miss_eager_loads_from_disk_but_does_not_build(inference: None) -> None:
    net = Net().eval()
    fast: Any = decorate(net, on_miss="eager")
    with pytest.warns(TvmifyWarning, match="on_miss='eager'") as said:
        for rows in (3, 2, 1, 3):
            assert torch.equal(fast(X[:rows]), net(X[:rows]))
    assert len(said) == 1 and len(str(said[0].message)) < 160
    assert str(fast.explain()).count("no cache has the program of this call (key ") == 3
    decorate(net)(X)
    fast.refresh()
    assert_same(fast)
    info = fast.cache_info()
    assert (info.builds, info.entries) == (0, 1)


def test_on_miss_error_raises_until_the_program_exists(inference: None) -> None:
    fast: Any = decorate(Net().eval(), on_miss="error")
    for _ in range(2):
        with pytest.raises(CacheMiss, match="no cache has the program of this call") as caught:
            fast(X)
    assert isinstance(caught.value, NotCompiled)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is CacheMiss
    assert str(copied) == str(caught.value)
    decorate(Net().eval())(X)
    assert_same(fast)
    assert fast.cache_info().builds == 0


def test_on_miss_error_names_the_nearest_entry(inference: None) -> None:
    decorate(Net().eval())(X)
    fast = decorate(Net().eval(), on_miss="error", accuracy="strict")
    with pytest.raises(CacheMiss, match=r"options\.accuracy: 'strict' → 'default'"):
        fast(X)


def test_on_miss_error_applies_to_misses_only(inference: None) -> None:
    fast = decorate(Net().train(), on_miss="error")
    with pytest.warns(TvmifyWarning, match="training mode"):
        fast(X)
    other: Any = decorate(Net().eval(), on_miss="error")
    other.warmup([(3, 4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(other)


def test_unknown_on_miss_policy() -> None:
    with pytest.raises(OptionError, match="'build', 'background', 'eager', 'error'"):
        decorate(Net(), on_miss="wait")
