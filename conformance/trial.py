"""One network through the decorator, compared with eager."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from conformance.architectures import Inputs, Sizes
from conformance.comparison import Different, compare
from tvmify import tvmify
from tvmify.decorate.decorated import dispatcher_of
from tvmify.dispatch.outcome import Compiled


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
        Whether the whole network was one compiled program.
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


#: The sizes of the calls: some differ in values only, the later ones in sizes.
SIZES = ((2, 12), (2, 12), (3, 17), (2, 9), (5, 13))


def attempt(name: str, subject: Subject, sizes: Sequence[Sizes] = SIZES) -> Trial:
    """Build a network, call it with other values and other sizes, and compare."""
    torch.manual_seed(0)
    trial = Trial(name, subject.kind)
    network = subject.build()
    # copies, since some models of transformers register hooks on themselves in a call
    wide = _in_float64(network)
    fast: Any = tvmify(copy.deepcopy(network), cache=False, compare=False, progress=False)
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
    _note_how_it_ran(fast, trial)
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


def _note_how_it_ran(fast: Any, trial: Trial) -> None:
    outcomes = list(dispatcher_of(fast).state.memory.values())
    outcome = outcomes[-1] if outcomes else None
    trial.programs = fast.cache_info().builds
    if not isinstance(outcome, Compiled):
        reason = outcome.reason if outcome is not None else None
        trial.reason = reason.reason if reason is not None else ""
        return
    reasons = [one.facts.one_shape for one in outcomes if isinstance(one, Compiled)]
    trial.one_shape = "; ".join(str(why.reason) for why in reasons if why is not None)
    report = outcome.executor.artifact.report
    trial.compiled = True
    trial.bridged = dict(report.get("bridged", {}))
    trial.operators = sum(report["operators"].values())
