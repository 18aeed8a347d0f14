"""One network through the decorator or ``torch.compile``, compared with eager."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.utils import counters

from conformance.architectures import Inputs, Sizes
from conformance.comparison import Different, compare
from tvmify import tvmify
from tvmify.decorate.decorated import dispatcher_of
from tvmify.dispatch.outcome import Compiled, Outcome
from tvmify.integrations.calls import GRAPHS


class Subject(Protocol):
    """How to build a network, draw the arguments of a call, and call it."""

    @property
    def kind(self) -> str:
        """Its group in the report."""
        ...

    @property
    def build(self) -> Callable[[], nn.Module]:
        """Builds the network, in evaluation mode."""
        ...

    @property
    def inputs(self) -> Callable[[Sizes], Inputs]:
        """Draws arguments."""
        ...

    @property
    def call(self) -> Callable[[Any, Inputs], Any]:
        """Calls the network with drawn arguments."""
        ...


@dataclass
class Trial:
    """The result of one network.

    Attributes
    ----------
    right
        Whether every result equals eager's.
    difference
        Where a result differs, and how; or the error that was raised.
    compiled
        Whether the whole network was one compiled program; with ``torch.compile``, one graph and
        all of it compiled.
    reason
        Why it was not.
    bridged
        The number of bridged calls, by operator.
    operators
        The number of operators in the program.
    error, eager_error
        Errors against float64 over the largest output, for the tensor where ours is largest.
    programs
        The number of programs built for all calls, which differ in their sizes.
    one_shape
        Why no program serves all shapes.
    seconds
        The time of the first call.
    way
        How it was compiled, one of `WAYS`.
    graphs, eager_graphs
        The number of graphs that Dynamo made, and of those that ran in eager. Those that it made
        again for other sizes are not counted.
    """

    name: str
    kind: str = ""
    right: bool = False
    difference: str = ""
    compiled: bool = False
    reason: str = ""
    bridged: dict[str, int] = field(default_factory=dict)
    operators: int = 0
    error: float = 0.0
    eager_error: float = 0.0
    programs: int = 0
    one_shape: str = ""
    seconds: float = 0.0
    way: str = "decorator"
    graphs: int = 0
    eager_graphs: int = 0


#: The sizes of the calls: some differ in values only, the later ones in sizes.
SIZES = ((2, 12), (2, 12), (3, 17), (2, 9), (5, 13))

_OPTIONS: dict[str, Any] = {"cache": False, "compare": False, "progress": False}


def attempt(
    name: str, subject: Subject, sizes: Sequence[Sizes] = SIZES, way: str = "decorator"
) -> Trial:
    """Build a network, call it with other values and other sizes, and compare."""
    torch.manual_seed(0)
    trial = Trial(name, subject.kind, way=way)
    network = subject.build()
    # copies, since some models of transformers register hooks on themselves in a call
    wide = _in_float64(network)
    compiled, note_how_it_ran = WAYS[way]
    fast = compiled(copy.deepcopy(network))
    drawn = [subject.inputs(size) for size in sizes]

    def seeded(network: nn.Module, inputs: Inputs) -> Any:
        torch.manual_seed(1)  # some draw random numbers in evaluation, too
        return subject.call(network, inputs)

    with torch.inference_mode():
        try:
            for inputs in (drawn[0], *drawn):
                start = time.perf_counter()
                result = seeded(fast, inputs)
                trial.seconds = trial.seconds or time.perf_counter() - start
                errors = compare(result, seeded(network, inputs), seeded(wide, _widened(inputs)))
                if errors.ours >= trial.error:
                    trial.error, trial.eager_error = errors.ours, errors.eager
            trial.right = True
        except Different as difference:
            trial.difference = str(difference)
    note_how_it_ran(fast, trial)
    return trial


def _in_float64(network: nn.Module) -> nn.Module:
    wide = copy.deepcopy(network).double()
    for part in wide.modules():
        # The default, PyTorch's grouped matrix product, has no float64 version.
        if getattr(getattr(part, "config", None), "_experts_implementation", None) is not None:
            part.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return wide


def _widened(inputs: Inputs) -> Inputs:
    return {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def _decorated(network: nn.Module) -> Any:
    return tvmify(network, **_OPTIONS)


def _note_program(fast: Any, trial: Trial) -> None:
    outcomes = list(dispatcher_of(fast).state.memory.values())
    outcome = outcomes[-1] if outcomes else None
    trial.programs = fast.cache_info().builds
    if isinstance(outcome, Compiled):
        _note_compiled(outcomes, trial)
    elif outcome is not None and outcome.reason is not None:
        trial.reason = outcome.reason.reason


def _compiled(network: nn.Module) -> Any:
    torch._dynamo.reset()
    counters.clear()
    GRAPHS.clear()
    return torch.compile(network, backend="tvmify", options=_OPTIONS)


def _note_graphs(_: Any, trial: Trial) -> None:
    graphs: set[str] = set()
    in_eager: set[str] = set()
    outcomes: list[Outcome] = []
    for graph in sorted(GRAPHS, key=lambda graph: graph.origin.label):
        # "graph 0/1" was made again after "graph 0/0", for other sizes
        number = graph.origin.label.partition("/")[0]
        graphs.add(number)
        for dispatcher in graph.dispatchers_for(None):
            found = dispatcher.state.memory.values()
            if not all(isinstance(outcome, Compiled) for outcome in found):
                in_eager.add(number)
            outcomes += found
            trial.programs += dispatcher.cache_info().builds
    breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
    refused = [outcome.reason.reason for outcome in outcomes if outcome.reason is not None]
    trial.reason = "; ".join(dict.fromkeys(breaks + refused))
    trial.graphs, trial.eager_graphs = len(graphs), len(in_eager)
    if trial.graphs == 1 and not in_eager and not breaks:
        _note_compiled(outcomes, trial)


def _note_compiled(outcomes: Sequence[Outcome], trial: Trial) -> None:
    compiled = [outcome for outcome in outcomes if isinstance(outcome, Compiled)]
    reasons = [one.facts.one_shape for one in compiled]
    trial.one_shape = "; ".join(str(why.reason) for why in reasons if why is not None)
    report = compiled[-1].executor.artifact.report
    trial.compiled = True
    trial.bridged = dict(report.get("bridged", {}))
    trial.operators = sum(report["operators"].values())


#: How to compile a network, and how to note the way it ran.
WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Trial], None]]] = {
    "decorator": (_decorated, _note_program),
    "torch.compile": (_compiled, _note_graphs),
}
