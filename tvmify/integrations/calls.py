"""The calls of one graph of ``torch.compile``: from Dynamo's guards to a dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.programs import Programs
from tvmify.dispatch.subject import Name, Subject
from tvmify.integrations.dynamo_graph import DynamoGraph, Origin
from tvmify.options import CompileOptions
from tvmify.system import forks

#: How many models of one class a graph serves at a time, each with its own weights.
_MOST_MODELS = 8
_NO_KEYWORDS: dict[str, Any] = {}

#: All graphs that are alive.
GRAPHS: weakref.WeakSet[GraphCalls] = weakref.WeakSet()


class GraphCalls:
    """Runs the calls of one graph.

    Dynamo passes the weights to each call. One graph serves all models that its guards cannot tell
    apart, so there is a dispatcher for each of them.

    Parameters
    ----------
    graph
        What Dynamo has recorded.
    options
        The options of the backend.
    """

    def __init__(self, graph: DynamoGraph, options: CompileOptions) -> None:
        self._graph, self._options = graph, options
        self._programs = Programs(options.cache_size)
        self._models: dict[tuple[int, ...], _Model] = {}
        self._lock = forks.Lock()
        self._latest: _Model | None = None
        self._pick_weights, self._pick_inputs = graph.pick_weights, graph.pick_inputs
        self._is_plain = not graph.has_numbers and graph.results is None
        GRAPHS.add(self)

    def __call__(self, *args: Any) -> Any:
        """Run one call, with the arguments that Dynamo passes."""
        model, weights = self._latest, self._pick_weights(args)
        if model is None or not model.has(weights):
            model = self._model(weights)
        if self._is_plain:
            return model.dispatcher(self._pick_inputs(args), _NO_KEYWORDS)
        args = self._graph.with_numbers(args)
        results = model.dispatcher(self._pick_inputs(args), _NO_KEYWORDS)
        order = self._graph.results
        return results if order is None else [results[i] if i >= 0 else args[~i] for i in order]

    @property
    def origin(self) -> Origin:
        """Where the graph comes from."""
        return self._graph.origin

    def dispatchers_for(self, weights: set[int] | None) -> list[Dispatcher]:
        """Return the dispatchers of one model, by the identities of its tensors; None for all
        models.
        """
        return [
            model.dispatcher
            for ids, model in list(self._models.items())
            if weights is None or weights.issuperset(ids or self.origin.parameters)
        ]

    def _model(self, weights: Sequence[torch.Tensor]) -> _Model:
        key = tuple(map(id, weights))
        with self._lock:
            model = self._models.pop(key, None)
            if model is None:
                model = _Model(self._graph, self._options, self._programs, weights)
                # A callback must not hold the lock: it may run within these lines.
                forget = partial(_forget, weakref.ref(self), key)
                model.watches = [weakref.ref(weight, forget) for weight in weights]
            elif not model.has(weights):
                model.take(weights)
            self._models[key] = self._latest = model  # the last one is the latest
            for old in list(self._models)[:-_MOST_MODELS]:
                self._models.pop(old, None)
        return model

    def forget(self, key: tuple[int, ...]) -> None:
        """Forget a model whose weights are gone."""
        model = self._models.pop(key, None)
        if model is not None and self._latest is model:
            self._latest = None


class _Model:
    """One set of weights that a graph is called with.

    Its module has separate tensors, which share the memory and version counters of the weights: so
    the memory of a model can be freed.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        options: CompileOptions,
        programs: Programs,
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._names = graph.weights
        self._ids = tuple(map(id, weights))
        self._addresses = _addresses(weights)
        self.watches: list[weakref.ref[torch.Tensor]] = []
        self.module = graph.module([weight.detach() for weight in weights])
        subject = Subject(
            Name(graph.origin.label, "forward"),
            eager=_forward,
            capturable=lambda module: module,
            options=options,
            module=self.module,
            is_part=True,  # it cannot be called to warm it up
            symbols=graph.symbols,
        )
        self.dispatcher = Dispatcher(subject, programs)

    def has(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these are its weights, with the same memory as before."""
        return tuple(map(id, weights)) == self._ids and _addresses(weights) == self._addresses

    def take(self, weights: Sequence[torch.Tensor]) -> None:
        """Update the weights whose ``data`` was replaced."""
        self._addresses = _addresses(weights)
        for name, weight in zip(self._names, weights, strict=True):
            self.module._buffers[name] = weight.detach()


def _addresses(weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    try:
        return tuple(map(torch.Tensor.data_ptr, weights))
    except RuntimeError:  # a weight without memory: such calls run in eager
        return ()


def _forget(calls: weakref.ref[GraphCalls], key: tuple[int, ...], _: object) -> None:
    if (alive := calls()) is not None:
        alive.forget(key)


def _forward(module: Callable[..., Any], *inputs: Any) -> Any:
    return module.forward(*inputs)  # type: ignore[attr-defined]
