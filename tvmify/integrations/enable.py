"""``tvmify.enable``: compiles everything that PyTorch's TorchScript executor runs.

A pass of the executor (``native/python/jit_graphs.cpp``) puts one node in the place of a graph.
Each such node has a `GraphCalls`, which decorates the graph like a TorchScript module, so that the
dispatcher handles control flow, aliasing, writes and refusals as usual.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.jit._recursive import wrap_cpp_module
from typing_extensions import Unpack

from tvmify.decorate.decorator import tvmify
from tvmify.options import CompileOptions, Options
from tvmify.system import forks

#: How many modules of one class a graph serves at a time, each with its own weights.
_MOST_MODULES = 8


class _Enabled(NamedTuple):
    """The options of one call of `enable`; a new object for each call."""

    options: dict[str, Any]


class _State:
    lock = forks.Lock()
    now: _Enabled | None = None


class Enabled:
    """What `enable` returns: a context manager that restores what was before."""

    def __init__(self, before: _Enabled | None) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        _switch(self._before)


def enable(**options: Unpack[Options]) -> Enabled:
    """Compile everything that PyTorch's TorchScript executor runs from now on, in all threads.

    It applies to functions and methods from ``torch.jit.trace``, ``torch.jit.script`` and
    ``torch.jit.load`` that the executor has not optimized yet, which it does at the second call of
    each. That call compiles; later ones compile only for new shapes. What cannot be compiled, and
    calls that need gradients, run in the JIT as before.

    Parameters
    ----------
    **options
        Fields of `CompileOptions`, such as ``strict`` and ``cache``. They replace those of an
        earlier call.

    Returns
    -------
    Enabled
        A context manager: at its end everything is as before.

    Raises
    ------
    OptionError
        An option does not exist, or its value is wrong. The message lists valid ones.

    Examples
    --------
    >>> traced = torch.jit.trace(resnet, image)
    >>> with torch.inference_mode(), tvmify.enable():
    ...     traced(image)  # PyTorch observes the call
    ...     traced(image)  # compiles
    ...     traced(image)  # runs compiled
    """
    CompileOptions.of(options)
    return Enabled(_switch(_Enabled({**options})))


def disable() -> None:
    """Run everything in the JIT again, including compiled graphs; calls in progress continue.

    After another `enable` with the same options, such graphs run compiled immediately.

    Examples
    --------
    >>> tvmify.enable(strict=True)
    >>> serve(traced)
    >>> tvmify.disable()
    """
    _switch(None)


def _switch(wanted: _Enabled | None) -> _Enabled | None:
    # Imported here because `tvmify.runtime` loads the libraries that it links to.
    from tvmify._C import jit_graphs

    with _State.lock:
        before, _State.now = _State.now, wanted
        jit_graphs(None if wanted is None else GraphCalls)
    return before


class _Made(NamedTuple):
    """A graph with the weights of one module.

    Attributes
    ----------
    state
        The state of the module when the weights were read.
    options
        Those that it was decorated with.
    run
        The decorated graph.
    """

    state: bytes
    options: dict[str, Any]
    run: Any


class GraphCalls:
    """Runs the calls of one graph.

    Parameters
    ----------
    graph
        What the executor would run. Its first argument is a module, if it is of a method.
    """

    def __init__(self, graph: torch._C.Graph) -> None:
        self._graph = graph
        self._made: dict[int, _Made] = {}
        self._lock = forks.Lock()

    def __call__(self, module: Any, address: int, state: bytes, args: tuple[Any, ...]) -> Any:
        """Run one call.

        Parameters
        ----------
        module
            TorchScript's own object; None for a function.
        address
            The same for the same module.
        state
            Changes when a tensor or number of the module does.
        args
            The other arguments.

        Returns
        -------
        Any
            The result; ``NotImplemented`` where the JIT is to run the call.
        """
        enabled = _State.now
        if enabled is None:
            return NotImplemented
        made = self._made.get(address)
        if made is None or made.state != state or made.options != enabled.options:
            made = self._make(module, address, state, enabled.options)
        return made.run(*args)

    def _make(self, module: Any, address: int, state: bytes, options: dict[str, Any]) -> _Made:
        with self._lock:
            made = _Made(state, options, tvmify(self._callable(module), **options))
            self._made.pop(address, None)
            self._made[address] = made
            for old in list(self._made)[:-_MOST_MODULES]:
                self._made.pop(old, None)
        return made

    def _callable(self, module: Any) -> Any:
        from tvmify._C import module_of_graph

        if module is None:
            return torch._C._create_function_from_graph("graph", self._graph)
        return wrap_cpp_module(module_of_graph(module, self._graph))
