"""The programs that a saved file contains for a call."""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from tvmify.artifact import Artifact
from tvmify.artifact.results import Argument
from tvmify.dispatch.attempt import Attempt
from tvmify.dispatch.dispatcher_state import DispatcherState
from tvmify.dispatch.generality.declared import Declared, declared_sizes
from tvmify.dispatch.generality.sizes import AnySizes, Sizes
from tvmify.dispatch.outcome import Compiled
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.request import Request
from tvmify.errors import NotCompiled
from tvmify.runtime import PackedWeights
from tvmify.signature import Args, Kwargs, without_repetitions
from tvmify.target import TargetOption


class Files:
    """Finds or builds programs for a file. The caller holds the lock of the dispatcher.

    Parameters
    ----------
    state
        The state of the dispatcher.
    sizes
        Which sizes vary between calls.
    stages
        Notified of each stage.
    """

    def __init__(self, state: DispatcherState, sizes: Sizes, stages: Stages) -> None:
        self._state = state
        self._sizes = sizes
        self._stages = stages

    def request(
        self, args: Args, kwargs: Kwargs, target: TargetOption, declared: Declared
    ) -> Request:
        """Return the request for a call, whose tensors are distinct and share no memory."""
        subject = self._state.subject
        args, kwargs = without_repetitions((args, kwargs))
        request = Request.of(args, kwargs, subject.options, target)
        declared = declared_sizes(subject, args, kwargs, declared)
        return dataclasses.replace(request, declared=declared)

    def artifact(self, request: Request) -> Artifact:
        """Return the program for one request, from a cache or the compiler.

        Raises
        ------
        NotCompiled
            The call cannot be compiled.
        """
        attempt = Attempt(self._state, request, self._stages)
        artifact = attempt.obtain(PackedWeights()).executor.artifact
        if not attempt.asks_for_layout:
            return artifact
        # A program of another module may be the same, so that it does not say so itself.
        leaves = enumerate(request.leaves)
        tensors = (Argument(i) for i, leaf in leaves if isinstance(leaf, torch.Tensor))
        return dataclasses.replace(artifact, needs_contiguous=tuple(tensors))

    def artifacts(self, request: Request) -> list[Artifact]:
        """Return the programs for a call whose sizes the caller did not declare.

        It is the program for its shapes if the call ran with that, or if there is no program with
        symbolic sizes. Otherwise it is the symbolic program of each class of sizes built so far.

        Raises
        ------
        NotCompiled
            The call cannot be compiled.
        """
        if self._has_own(request):
            return [self.artifact(request)]
        if made := self._made(request):
            return made
        if (general := self._general(request)) is not None:
            with contextlib.suppress(NotCompiled):
                return [self._for_any_sizes(request, general)]
        return [self.artifact(request)]

    def declared_artifacts(self, request: Request) -> list[Artifact]:
        """Return the programs for a call with sizes that the caller declared to vary.

        It is one program for all declared sizes. If no more programs are built, it is the symbolic
        program of each class of sizes built so far.

        Raises
        ------
        NotCompiled
            The call cannot be compiled, or no program serves all declared sizes.
        """
        if (general := self._general(request)) is not None:
            return [self._for_any_sizes(request, general)]
        if made := self._made(request):
            return made
        raise NotCompiled(
            "no other program with symbolic sizes is built: the limit is reached, or the program "
            "is for a GPU",
            "Replace each Dim by a number.",
        )

    def _made(self, request: Request) -> list[Artifact]:
        made = self._sizes.made_with(request)
        return [self.artifact(request.generalized(general)) for general in made]

    def _general(self, request: Request) -> AnySizes | None:
        """Return the request's arguments with symbols, if sizes vary from the first call on."""
        vary = self._state.subject.options.dynamic is True or request.declared
        return self._sizes.general(request) if vary else None

    def _for_any_sizes(self, request: Request, general: AnySizes) -> Artifact:
        """Return a program with symbolic sizes that serves the call."""
        while True:
            wanted = request.generalized(general)
            try:
                artifact = self.artifact(wanted)
                general.check(artifact, wanted)
                return artifact
            except NotCompiled as reason:
                narrower = self._sizes.narrower(request, general, reason)
                if narrower is None:
                    raise
                general = narrower

    def _has_own(self, request: Request) -> bool:
        """Whether such a call ran with a program for its shapes only."""
        outcomes = self._state.memory.values()
        own = (x for x in outcomes if isinstance(x, Compiled) and not x.facts.shapes)
        return any(outcome.specs == request.specs() for outcome in own)
