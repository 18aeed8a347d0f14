"""The one lock for everything that enters torch's tracing, whose state is process-wide.

It guards the state that torch sets and restores while it exports, decomposes, scripts or traces:
the flags behind ``torch.compiler.is_compiling()``, the metadata of new nodes in
``torch.fx.traceback``, operator rules that are replaced during decomposition, patches of
``nn.Module``, and the type tables of ``torch.jit``. It also guards what we change around that:
levels of torch's loggers, ``print`` in ``torch.export``, the generator that refuses seeds. If two
threads interleave their saving and restoring, that state stays wrong for good.

Mode stacks are per thread, and so are the warnings that `tvmify.torch_compat.silence` hides.

Lock order: a thread that holds one of these locks takes only later ones.

1. the lock of a `Dispatcher`; that of a module before those of its regions and children
2. ``load_or_build._BUILDING``
3. the file lock of an entry in the disk cache
4. ``compiler._ONE_AT_A_TIME``
5. this one
6. locks around a few lines that take no other lock: ``methods._MAKING``, those of `MemoryCache`,
   `Executor`, the disk cache, the background's queue

Others who change the same state, such as a user's ``torch.export.export`` in another thread, take
no lock of ours. They are found on the stacks of threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tvmify.errors import TracedElsewhere, warn
from tvmify.system import forks
from tvmify.torch_compat.tracers import tracer_of_other_threads

_LOCK = forks.Lock()
#: The thread that traces.
_tracing: int | None = None
#: What to restore after a foreign tracer that began, and so saved our state, during our tracing.
_owed: list[tuple[dict[str, Any], str, Any]] = []
_has_warned = False

#: State that torch saves and restores around tracing, by module.
_STATE = {
    "torch.compiler": ("_is_compiling_flag", "_is_exporting_flag"),
    "torch.fx.traceback": (
        "should_preserve_node_meta",
        "_should_preserve_node_meta",
        "current_meta",
        "current_replay_node",
    ),
    "torch.fx._symbolic_trace": ("_is_fx_tracing_flag",),
}


@contextlib.contextmanager
def tracing(*, beside_others: bool = False) -> Iterator[None]:
    """Make this the one thread of ours that traces.

    Parameters
    ----------
    beside_others
        Go on even if a foreign thread traces, where there is no alternative.

    Raises
    ------
    TracedElsewhere
        Another thread is tracing without our lock. This also replaces any other error, since that
        thread may have caused it.
    """
    global _tracing  # noqa: PLW0603
    with _LOCK:
        if _tracing is not None:
            yield
            return
        if not beside_others:
            refuse_other_tracers()
        before: list[tuple[dict[str, Any], str, Any]] = []
        if tracer_elsewhere() is None:
            _put_back(_owed)
            before = _state()
        _tracing = threading.get_ident()
        try:
            yield
        except Exception as error:
            if not beside_others:
                refuse_other_tracers(error)
            raise
        finally:
            _tracing = None
            _let_go()
            if tracer_elsewhere() is None:
                _put_back(before or _owed)
            else:
                _owed[:] = before or _owed


def traces_here() -> bool:
    """Whether this thread is the one of ours that traces."""
    return _tracing == threading.get_ident()


def traces_elsewhere() -> bool:
    """Whether another thread of ours traces."""
    return _tracing not in (None, threading.get_ident())


def refuse_other_tracers(error: Exception | None = None) -> None:
    """Raise if a foreign thread traces, with `error`, if any, as the cause.

    Raises
    ------
    TracedElsewhere
        A foreign thread traces.
    """
    if (name := tracer_elsewhere()) is not None:
        raise TracedElsewhere(
            f"another thread is in {name}, whose state belongs to the whole process",
            "Nothing to do: a later call will compile.",
        ) from error


def tracer_elsewhere() -> str | None:
    """Return the name of the API that traces in another thread without our lock, or None."""
    if traces_elsewhere():
        return None  # our own tracing
    return tracer_of_other_threads()


def settle() -> None:
    """Handle ``torch.compiler.is_compiling()`` being true although this thread is not traced.

    If no other thread is traced either, the flag is stale. It is reset if our tracing was involved;
    otherwise a warning says so, once.
    """
    global _has_warned  # noqa: PLW0603
    if _tracing is not None or (_has_warned and not _owed) or tracer_elsewhere() is not None:
        return
    with _LOCK:
        if tracer_elsewhere() is not None:
            return
        _put_back(_owed)
    if _is_left_behind() and not _has_warned:
        _has_warned = True
        warn(
            "torch.compiler.is_compiling() is true although no thread compiles: something left "
            "it set. Calls still run compiled, but a little slower. Find out what sets it, and do "
            "not use torch.export or torch.compile in two threads at once."
        )


def _is_left_behind() -> bool:
    # Tracing may have begun or ended between the checks of the flag and of the threads.
    return (
        tracer_elsewhere() is None
        and torch.compiler.is_compiling()
        and _tracing is None
        and tracer_elsewhere() is None
    )


def forget_tensors(*modes: Any) -> None:
    """Make fake tensor modes forget the real tensors that they have seen.

    A reference cycle keeps such a mode alive, and ``torch.utils.swap_tensors`` refuses parameters
    to which it holds weak references.
    """
    for mode in modes:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def fake_modes(graph: torch.fx.Graph) -> set[Any]:
    """Return the modes of the fake tensors that describe the values of a graph."""
    values = (node.meta.get("val") for node in graph.nodes)
    return {value.fake_mode for value in values if isinstance(value, FakeTensor)}


def _let_go() -> None:
    """Drop the latest graph, which torch keeps.

    It holds weak references to all weights, and ``torch.utils.swap_tensors`` refuses such tensors.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    getattr(tracer, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
    generators = sys.modules.get("torch._decomp.decompositions_for_rng")
    if (tracker := getattr(generators, "PhiloxStateTracker", None)) is not None:
        tracker.reset()


def _state() -> list[tuple[dict[str, Any], str, Any]]:
    state = []
    for module, names in _STATE.items():
        variables = vars(sys.modules[module]) if module in sys.modules else {}
        state += [(variables, name, variables[name]) for name in names if name in variables]
    return state


def _put_back(state: list[tuple[dict[str, Any], str, Any]]) -> None:
    for variables, name, value in state:
        variables[name] = value
    _owed.clear()


def _after_fork_in_child() -> None:
    global _tracing  # noqa: PLW0603
    if _tracing != threading.get_ident():
        _tracing = None


os.register_at_fork(after_in_child=_after_fork_in_child)
