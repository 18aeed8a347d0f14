"""Calls as CUDA graphs: which are captured, replayed and evicted, with a fake of CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from tests.runtime import programs
from tvmify import TvmifyWarning
from tvmify.artifact import Artifact
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, Constant, Repeated, View
from tvmify.artifact.writes import Write
from tvmify.runtime import Executor, PackedWeights, executor, graphs
from tvmify.runtime.graphs import Captured, Graphs, obstacle

CUDA = '{"arch": "sm_90a", "kind": "cuda"}'


class Stream:
    """A fake stream that records what it waits for."""

    def __init__(self, name: str = "capture") -> None:
        self.name = name
        self.waits: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class Device:
    """The state of the fake: PyTorch's current stream, and what happened."""

    def __init__(self) -> None:
        self.stream = Stream("default")
        self.is_capturing = False
        self.captured = self.replayed = 0
        self.fails = False
        self.capturing = False
        self.workspaces_cleared: list[bool] = []  # while capturing?
        self.pools_left: list[Any] = []
        self.read: list[tuple[int, str]] = []  # tensors, by address, and streams that read them

    def clear_workspaces(self) -> None:
        self.workspaces_cleared.append(self.capturing)

    @contextlib.contextmanager
    def capture(self, graph: Graph, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local" and pool == (0, 1)
        # As in PyTorch, which does not restore the stream if the end of a capture fails.
        before, self.stream = self.stream, stream
        self.capturing = True
        yield
        self.capturing = False
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.stream = before

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Any:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class Graph:
    """A fake graph, whose work is known once it is captured."""

    replay: Any = None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A fake GPU: tensors are on the CPU, and a replay computes into the results of the capture."""
    device = Device()

    class Captured(graphs.Captured):
        def __init__(self, run: Any, inputs: Any, kept: Any) -> None:
            super().__init__(run, inputs, kept)
            device.captured += 1

        def _record(self, run: Any, pool: Any) -> Any:
            recording = super()._record(run, pool)

            def replay() -> None:
                device.replayed += 1
                for result, new in zip(recording.results, run(self._inputs), strict=True):
                    result.data.copy_(new)

            recording._graph.replay = replay
            return recording

    fakes = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "graph": device.capture,
        "stream": device.use,
        "current_stream": lambda: device.stream,
        "device": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: device.is_capturing,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    bindings = {
        "_cuda_clearCublasWorkspaces": device.clear_workspaces,
        "_cuda_endAllocateToPool": lambda index, pool: device.pools_left.append(pool),
    }
    for name, fake in bindings.items():
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    read = lambda tensor, stream: device.read.append((tensor.data_ptr(), stream.name))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", read)
    monkeypatch.setattr(graphs, "Captured", Captured)
    monkeypatch.setattr(executor, "obstacle", lambda _: "")
    return device


def x(value: float = 1.0) -> torch.Tensor:
    return torch.full((4, 16), float(value))


def test_second_call_is_captured_and_replayed(device: Device):
    call = Executor(programs.added()).call(Graphs())
    results = []
    for number in range(5):
        results.append(call((x(number),)))
        assert device.captured == (number > 0)
    assert device.replayed == 4
    for number, result in enumerate(results):  # none is written to by a later call
        assert torch.equal(result, x(2 * number))


class Launches:
    """Counts launches that copy tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[int] = []  # tensors of each launch
        copy = torch._foreach_copy_

        def counted(into: Any, given: Any) -> None:
            self.copied.append(len(into))
            copy(into, given)

        monkeypatch.setattr(torch, "_foreach_copy_", counted)

    def __call__(self, call: Any, *inputs: torch.Tensor) -> tuple[Any, list[int]]:
        self.copied.clear()
        return call(inputs), list(self.copied)


def captured() -> Any:
    """Return a call that is captured."""
    call: Any = Executor(programs.added()).call(Graphs())
    for _ in range(2):
        call((x(),))
    return call


def test_result_stays_in_the_graph_until_held(device: Device, monkeypatch: pytest.MonkeyPatch):
    call, launches = captured(), Launches(monkeypatch)
    inputs, both = [1], [1, 1]  # copied: the input, and perhaps the result
    first, copied = launches(call, x(1))
    place = first.data_ptr()
    assert copied == inputs
    second, copied = launches(call, x(2))
    assert copied == both and second.data_ptr() != place
    view = first[0]
    del first
    third, copied = launches(call, x(3))  # a view is enough
    assert copied == both and third.data_ptr() not in (place, second.data_ptr())
    assert torch.equal(view, x(2)[0])
    assert torch.equal(second, x(4)) and torch.equal(third, x(6))
    view.zero_()  # users may write to a result
    del view
    fourth, copied = launches(call, x(4))
    assert copied == inputs and fourth.data_ptr() == place and torch.equal(fourth, x(8))
    assert torch.equal(second, x(4)) and torch.equal(third, x(6))


def test_a_result_may_be_the_next_argument(device: Device):
    call, value = captured(), x()
    for number in range(1, 6):
        given, value = value, call((value,))
        assert torch.equal(given, x(2 ** (number - 1))) and torch.equal(value, x(2**number))


def test_resized_result_is_not_reused(device: Device):
    call = captured()
    result = call((x(),))
    result.resize_(1000)
    del result
    results = [call((x(number),)) for number in range(3)]
    assert all(torch.equal(result, x(2 * number)) for number, result in enumerate(results))


def test_results_of_inference_mode_can_be_used_outside(device: Device):
    call: Any = Executor(programs.added()).call(Graphs())
    with torch.inference_mode():
        for _ in range(3):
            call((x(),))
    result = call((x(),))
    assert not result.is_inference() and not result._is_view()
    weight = x().requires_grad_()
    (result * weight).sum().backward()
    assert torch.equal(weight.grad, x(2))


def test_all_tensors_of_a_dtype_are_copied_by_one_launch(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    given = (x(1), torch.full((3,), 2), x(3), x(4))
    call: Any = Executor(programs.each_added()).call(Graphs())
    call(given)
    call(given)
    launches = Launches(monkeypatch)
    held, copied = launches(call, *given)
    assert copied == [3, 1]
    results, copied = launches(call, *(2 * tensor for tensor in given))
    assert copied == [3, 1, 3, 1]
    for tensor, one, other in zip(given, held, results, strict=True):
        assert torch.equal(one, 2 * tensor) and torch.equal(other, 4 * tensor)


def test_other_stream_waits_for_readers(device: Device):
    call, mine, other = captured(), device.stream, Stream("other")
    lent = call((x(),))
    with device.use(other):
        call((x(),))
        assert other.waits == ["default"]
        del lent  # the first stream may still read it
        again = call((x(),))
    assert other.waits == ["default"] * 2 and torch.equal(again, x(2))
    assert mine.waits == ["capture"]


def test_workspaces_are_cleared_where_pytorch_does_not_unmap_them(device: Device):
    captured()
    assert device.workspaces_cleared == [True, False] * 2


def test_a_result_is_built_of_clones_arguments_views_and_constants(device: Device):
    view = View(Computed(0), Geometry((16,), (1,), 16))
    outputs = (Computed(0), Argument(0), view, Repeated(0), Constant("text"))
    structure = programs.artifact(b"", result=[0, 0, 0, 0, 0]).output_structure
    added = dataclasses.replace(programs.added(), outputs=outputs, output_structure=structure)
    call = Executor(added).call(Graphs())
    for _ in range(3):
        given = torch.randn(4, 16)
        whole, argument, row, same, constant = call((given,))
        assert torch.equal(whole, given + given)
        assert argument is given and same is whole and constant == "text"
        assert row.data_ptr() == whole[1].data_ptr() and torch.equal(row, whole[1])
    assert device.replayed == 2


def test_new_weights_are_captured_anew(device: Device):
    linear = Executor(programs.linear())
    given = torch.randn(4, 16)
    call = None
    for _ in range(2):
        weights = [torch.randn(8, 16), torch.randn(8)]
        linear.bind(weights, PackedWeights())
        call = call or linear.call(Graphs())
        for _ in range(3):
            torch.testing.assert_close(call((given,)), torch.nn.functional.linear(given, *weights))
    assert device.captured == 2 and device.replayed == 4


def test_graph_keeps_its_weights_alive(device: Device):
    linear, store = Executor(programs.linear()), PackedWeights()
    linear.bind([torch.randn(8, 16), torch.randn(8)], store)
    call: Any = linear.call(Graphs())
    call((torch.randn(4, 16),))
    call((torch.randn(4, 16),))
    packed = store.take(programs.linear().packed, list)
    assert call._graph._kept is linear._packed
    assert all(any(held is tensor for held in call._graph._kept) for tensor in packed)


def test_graph_keeps_its_code_alive(device: Device):
    # The driver crashes if a graph launches kernels of an unloaded library.
    def run(given: Any) -> list[torch.Tensor]:
        return [given[0] + 1]

    graph, code = Captured(run, [x()], []), weakref.ref(run)
    del run
    gc.collect()
    assert code() is not None
    del graph
    gc.collect()
    assert code() is None


def test_the_graph_used_longest_ago_makes_place(device: Device):
    kept = Graphs(most=2)
    calls: list[Any] = [Executor(programs.added()).call(kept) for _ in range(3)]
    for call in calls:
        call((x(),))
        call((x(),))
    assert [call._graph is not None for call in calls] == [False, True, True]
    calls[1]((x(),))
    calls[0]((x(),))
    calls[0]((x(),))
    assert [call._graph is not None for call in calls] == [True, True, False]


def test_dead_calls_do_not_count(device: Device):
    kept = Graphs(most=1)
    first: Any = Executor(programs.added()).call(kept)
    for call in (Executor(programs.added()).call(kept), first):
        call((x(),))
        call((x(),))
    del call
    gc.collect()
    assert first._graph is not None


def test_outer_capture_records_the_kernels(device: Device):
    call = Executor(programs.added()).call(Graphs())
    device.is_capturing = True
    for _ in range(3):
        assert torch.equal(call((x(),)), x(2))
    assert device.captured == device.replayed == 0


def test_uncapturable_program_runs_directly(device: Device):
    call: Any = Executor(programs.added()).call(Graphs())
    device.fails = True
    assert torch.equal(call((x(),)), x(2))
    for _ in range(4):  # twice more it is tried
        assert torch.equal(call((x(),)), x(2))
    with pytest.warns(TvmifyWarning, match="cannot be captured: operation not permitted"):
        assert torch.equal(call((x(),)), x(2))
    assert torch.equal(call((x(),)), x(2))
    assert device.pools_left == [(0, 1)] * 3
    device.fails = False
    call((x(),))
    call((x(),))
    assert device.captured == 0


def test_failed_capture_restores_the_stream(device: Device):
    call: Any = Executor(programs.added()).call(Graphs())
    mine, device.fails = device.stream, True
    call((x(),))
    call((x(),))
    assert device.stream is mine
    device.fails = False
    call((x(),))
    call((x(),))
    assert device.captured == 1  # the next attempt may succeed


def test_memory_that_a_graph_reads_is_not_given_away_before_its_streams_are_done(device: Device):
    linear, store = Executor(programs.linear()), PackedWeights()
    linear.bind([torch.randn(8, 16), torch.randn(8)], store)
    call: Any = linear.call(Graphs())
    for _ in range(4):
        call((torch.randn(4, 16),))
    held = (*call._graph._inputs, *call._graph._kept)
    streams = "capture", "default"
    # each tensor once for each stream
    assert device.read == [(tensor.data_ptr(), name) for name in streams for tensor in held]


def test_another_stream_waits_for_the_last_one(device: Device):
    call = Executor(programs.added()).call(Graphs())
    default, other = device.stream, Stream("other")
    call((x(),))
    call((x(),))
    assert default.waits == ["capture"]
    call((x(),))
    assert default.waits == ["capture"]
    with device.use(other):
        call((x(),))
    assert set(other.waits) == {"default"}


def of(**fields: Any) -> Artifact:
    return dataclasses.replace(programs.added(), **({"target": CUDA} | fields))


def test_graph_eligibility():
    assert obstacle(of()) == ""
    assert obstacle(of(target=programs.added().target)) == "it runs on the CPU"
    assert "writes" in obstacle(of(writes=(Write(Argument(0), Computed(0)),)))
    assert "share memory" in obstacle(of(needs_contiguous=(Argument(0),)))
    view = View(Computed(0), Geometry((2,), (1,), 0))
    assert "share memory" in obstacle(of(outputs=(Computed(0), view)))
    assert "takes no tensors" in obstacle(of(inputs=()))
    draws = ("aten.rand_like.default",)
    assert "random numbers (aten.rand_like.default)" in obstacle(of(draws=draws))


def test_cpu_program_is_not_a_graph():
    assert isinstance(Executor(programs.added()).call(Graphs()), graphs.Call)
