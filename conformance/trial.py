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
    """How to make a network, to draw the arguments of a call, and to call it."""

    @property
    def kind(self) -> str:
        """What it belongs to in the report."""
        ...

    @property
    def build(self) -> Callable[[], nn.Module]:
        """Makes the network, in evaluation mode."""
        ...

    @property
    def inputs(self) -> Callable[[Sizes], Inputs]:
        """Draws arguments."""
        ...

    @property
    def call(self) -> Callable[[Any, Inputs], Any]:
        """Calls the network with arguments that were drawn."""
        ...


@dataclass
class Trial:
    """What came of one network.

    Attributes
    ----------
    right
        Whether every result was eager's.
    difference
        Where it was not, and how; or what went wrong on the way there.
    compiled
        Whether all of it was one compiled program.
    reason
        Why it was not.
    bridged
        How often each operator of the program ran as a call of PyTorch's.
    operators
        How many the program has.
    error, eager_error
        Against float64 over the largest output, of the tensor where ours is largest.
    programs
        How many were built for all calls, which differ in their sizes.
    one_shape
        Why there is a program for each shape, where there is none for any.
    seconds
        Of the first call.
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


#: Those of the calls: the first three differ in values, the last ones in sizes.
SIZES = ((2, 12), (2, 12), (3, 17), (2, 9), (5, 13))


def attempt(name: str, subject: Subject, sizes: Sequence[Sizes] = SIZES) -> Trial:
    """Build a network, call it with other values and other sizes, and compare."""
    torch.manual_seed(0)
    trial = Trial(name, subject.kind)
    network = subject.build()
    # copies, for some models of transformers leave hooks in themselves when they are called
    wide = _in_float64(network)
    fast: Any = tvmify(copy.deepcopy(network), cache=False, compare=False, progress=False)
    drawn = [subject.inputs(size) for size in sizes]

    def seeded(network: nn.Module, inputs: Inputs) -> Any:
        torch.manual_seed(1)  # some draw numbers in evaluation, too
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
        # PyTorch's product of groups of rows, which is the default, takes no float64.
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
