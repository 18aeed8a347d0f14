"""Calls as CUDA graphs: one launch for all kernels of a program, with ``cuda_graph=True``.

A graph replays kernels with the addresses that were captured. So inputs are copied into the graph's
buffers, no call overwrites results that are still alive, and the graph keeps the packed weights
that it reads alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tvmify.artifact import Artifact
from tvmify.artifact.results import Computed, View, computed_count, materialize
from tvmify.errors import warn
from tvmify.runtime.native import Call, Lent
from tvmify.system import forks
from tvmify.system.forks import short_lock
from tvmify.target import Target

#: The most graphs of one module: each keeps the memory of a whole call.
MOST_GRAPHS = 16
#: Calls that run normally before a signature is captured, and how many captures may fail: a thread
#: that synchronizes with the GPU invalidates a capture in another.
_PLAIN_CALLS, _MOST_FAILURES = 1, 3

Tensors = list[torch.Tensor]

# CUDA captures for one thread at a time; other threads run without a graph.
_CAPTURING = short_lock()


def no_capture(artifact: Artifact) -> contextlib.AbstractContextManager[object]:
    """Keep other threads from capturing, if the artifact is for a GPU."""
    is_for_gpu = Target.parse(artifact.target).kind == "cuda"
    return _CAPTURING if is_for_gpu else contextlib.nullcontext()


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether this thread is capturing a CUDA graph, on the given or the current GPU."""
    if not torch.cuda.is_initialized():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def obstacle(artifact: Artifact) -> str:
    """Return why a program cannot be captured as a graph; empty if it can.

    Parameters
    ----------
    artifact
        The program.
    """
    if Target.parse(artifact.target).kind != "cuda":
        return "it runs on the CPU"
    if not artifact.inputs or not computed_count(artifact.outputs):
        return "it takes no tensors, or computes none"
    if artifact.writes or artifact.state:
        return "it writes to tensors or returns them"
    if artifact.needs_contiguous or any(isinstance(output, View) for output in artifact.outputs):
        return "its results share memory"
    if artifact.shapes is not None:
        return "it serves many shapes"
    if artifact.draws:
        return f"it draws random numbers ({', '.join(artifact.draws)})"
    return ""


class _Recording:
    """A CUDA graph with the tensors that each replay writes its results to.

    Parameters
    ----------
    graph
        The graph.
    results
        What it computes, in its memory. Nobody else holds them yet.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Tensors) -> None:
        self.results = results
        self._graph = graph
        self._reader: torch.cuda.Stream | None = None
        self._lent = Lent(results)

    def is_free(self) -> bool:
        """Whether all that `lend` returned is gone, with all views of it."""
        return self._lent.is_free()

    def lend(self, stream: torch.cuda.Stream) -> Tensors:
        """Replay it on a stream, and return the results where they are."""
        if self._reader not in (None, stream):
            stream.wait_stream(self._reader)  # it may still read what was lent before
        self._reader = stream
        self._graph.replay()
        return self._lent.lend()

    def copied(self) -> Tensors:
        """Replay it, and return copies of the results."""
        self._graph.replay()
        copies = [torch.empty_like(result) for result in self.results]
        for indices in _by_dtype(self.results):
            _copy(copies, self.results, indices)
        return copies


class Captured:
    """A captured graph, and the tensors that it reads and writes.

    Results stay where the graph wrote them as long as anybody holds them. Until they are freed,
    calls replay a twin of the graph, in the same memory but for its results, and copy these.

    Parameters
    ----------
    run
        Runs the program on its inputs.
    inputs
        Inputs of one call; later ones have the same shapes, dtypes and device.
    kept
        Other tensors that the graph reads; they are kept alive as long as the graph is, and so is
        `run`, with the kernels that it launches.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Tensors],
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> None:
        self._kept, self._run = kept, run
        self._device = inputs[0].device
        self._on_device = torch.cuda.device(self._device)  # for calls, which hold the lock
        self._streams: set[torch.cuda.Stream] = set()
        self._using = forks.Lock()
        self._launches = _by_dtype(inputs)
        # In inference mode, calls outside of it could not copy into the inputs, and would return
        # tensors that autograd refuses.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self._device):
            self._inputs = tuple(
                torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs
            )
            self._stream = torch.cuda.current_stream()
            # Restores the thread's stream even if the capture fails.
            with torch.cuda.stream(torch.cuda.Stream()):
                self._follow(torch.cuda.current_stream())
                self._take(inputs)
                run(self._inputs)  # libraries do their one-time setup here
                pool = torch.cuda.graph_pool_handle()
                self._lending, self._spare = (self._record(run, pool) for _ in range(2))

    def _record(self, run: Callable[[Sequence[Any]], Tensors], pool: Any) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may keep allocating.
            mode = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, pool, **mode):
                # cuBLAS workspaces belong to a stream, and streams are reused: clearing them gives
                # the graph a private workspace in its own pool (as in torch's cudagraph_trees).
                # Only here: PyTorch empties its cache where a capture begins, and another thread
                # may be about to launch a product with a workspace that would be unmapped then.
                torch._C._cuda_clearCublasWorkspaces()
                results = run(self._inputs)
        except BaseException:
            # A failed capture may leave the allocator in capture mode; it raises if it did not.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, pool)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return _Recording(graph, results)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Tensors | None:
        """Replay on PyTorch's current stream, and return results that no later call changes.

        None if this thread is capturing a graph, which cannot hold another.
        """
        with self._using, torch.no_grad(), self._on_device:
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = torch.cuda.current_stream()
            self._follow(stream)
            self._take(inputs)
            if self._lending.is_free():
                return self._lending.lend(stream)
            return self._spare.copied()

    def _take(self, inputs: Sequence[torch.Tensor]) -> None:
        for indices in self._launches:
            _copy(self._inputs, inputs, indices)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Switch to a stream, after making it wait for the previous one."""
        if stream == self._stream:
            return
        stream.wait_stream(self._stream)
        self._stream = stream
        if stream not in self._streams:
            # PyTorch must not reuse their memory before the stream is done with it.
            for tensor in (*self._inputs, *self._kept):
                tensor.record_stream(stream)
            self._streams.add(stream)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the tensors that PyTorch can copy by one launch."""
    found: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(index)
    return list(found.values())


def _copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], indices: Sequence[int]
) -> None:
    torch._foreach_copy_([targets[i] for i in indices], [sources[i] for i in indices])


class Graphs:
    """The calls of one module that have a graph; the least recently used one is dropped first."""

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._lock = short_lock()
        self._calls: OrderedDict[weakref.ref[GraphedCall], None] = OrderedDict()
        self._latest: weakref.ref[GraphedCall] | None = None

    def used(self, call: GraphedCall) -> None:
        """Record that a call uses its graph now."""
        if self._latest is not None and self._latest() is call:
            return
        with self._lock:
            self._latest = reference = weakref.ref(call)
            self._calls[reference] = None
            self._calls.move_to_end(reference)
            alive = [known for known in self._calls if known() is not None]
            self._calls = OrderedDict.fromkeys(alive[-self._most :])
        for known in alive[: -self._most]:
            if (oldest := known()) is not None:
                oldest.forget()


class GraphedCall:
    """A call that is captured the second time it is made, and replayed from then on.

    Parameters
    ----------
    call
        The call without a graph.
    compiled
        The same program, as a ``torch.classes.tvmify.CompiledModule``.
    artifact
        The program's artifact, which has no `obstacle`.
    rebuild
        Builds the result from its leaves; None if it is a single leaf.
    graphs
        The graphs of the module.

    Attributes
    ----------
    problem
        Why capturing failed, so that the call runs without a graph; empty if it did not fail.
    """

    def __init__(
        self,
        call: Call,
        compiled: Any,
        artifact: Artifact,
        rebuild: Callable[[list[Any]], Any] | None,
        graphs: Graphs,
    ) -> None:
        self._call = call
        self._artifact = artifact
        self._rebuild = rebuild
        self._graphs = graphs
        computed = [Computed(i) for i in range(computed_count(artifact.outputs))]
        self._returns_all = list(artifact.outputs) == computed
        self._run = Call(compiled, tuple(range(len(artifact.inputs))), computed, list)
        self._graph: Captured | None = None
        self._kept: Sequence[torch.Tensor] = ()
        self._calls = self._failures = 0
        self.problem = ""

    def __call__(self, leaves: tuple[Any, ...]) -> Any:
        """Run the program."""
        inputs = [leaves[index] for index in self._artifact.inputs]
        graph = self._graph or self._captured(inputs)
        results = None if graph is None else graph(inputs)
        if results is None:
            return self._call(leaves)  # whose kernels may become a part of the caller's graph
        self._graphs.used(self)
        return self._result(results, leaves)

    def bind(self, state: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        """Do what `Call.bind` does, and drop the graph, which reads the old weights."""
        self._call.bind(state, weights)
        self.forget()

    def keep(self, packed: Sequence[torch.Tensor]) -> None:
        """Keep the packed weights of later calls alive as long as a graph may read them."""
        self._kept = packed
        self.forget()

    def forget(self) -> None:
        """Drop the graph; a later call is captured again."""
        self._graph = None
        self._calls = 0

    def obstacle(self, leaves: tuple[Any, ...]) -> str | None:
        """Return why the program cannot take these leaves; None if it can."""
        return self._call.obstacle(leaves)

    def _captured(self, inputs: Sequence[torch.Tensor]) -> Captured | None:
        if is_capturing(inputs[0].device):
            return None
        self._calls += 1
        if self.problem or self._calls <= _PLAIN_CALLS or not _CAPTURING.acquire(blocking=False):
            return None
        try:
            kept, run = self._kept, self._run
            graph = Captured(lambda given: run(tuple(given)), inputs, kept)
            if kept is self._kept:  # otherwise it has captured weights that are gone
                self._graph = graph
        except RuntimeError as error:
            self._calls = 0
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                self.problem = str(error)
                warn(f"cuda_graph=True has no effect on a call, which cannot be captured: {error}")
        finally:
            _CAPTURING.release()
        return self._graph

    def _result(self, tensors: Tensors, leaves: tuple[Any, ...]) -> Any:
        if not self._returns_all:
            tensors = materialize(self._artifact.outputs, tensors, leaves)
        return tensors[0] if self._rebuild is None else self._rebuild(tensors)
