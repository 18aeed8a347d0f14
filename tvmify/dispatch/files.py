"""What a saved file holds for a call: its own program, or those for calls of any sizes."""

from __future__ import annotations

import dataclasses

from tvmify.artifact import Artifact
from tvmify.dispatch.declared import Declared, declared_sizes
from tvmify.dispatch.miss import Miss, Shared
from tvmify.dispatch.outcome import Compiled
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.request import Args, Kwargs, Request
from tvmify.dispatch.sizes import AnySizes, Sizes
from tvmify.errors import NotCompiled
from tvmify.runtime import PackedWeights
from tvmify.signature import apart
from tvmify.target import TargetOption


class Files:
    """Finds or builds programs for a file; the lock of the dispatcher is held meanwhile.

    Parameters
    ----------
    shared
        What the dispatcher has.
    sizes
        Which sizes of calls were seen to vary.
    stages
        Told the name of each stage as it begins.
    """

    def __init__(self, shared: Shared, sizes: Sizes, stages: Stages) -> None:
        self._shared = shared
        self._sizes = sizes
        self._stages = stages

    def request(
        self, args: Args, kwargs: Kwargs, target: TargetOption, declared: Declared
    ) -> Request:
        """Return the request for a call; what a file holds serves all arguments of its kind."""
        subject = self._shared.subject
        args, kwargs = apart((args, kwargs))
        request = Request.of(args, kwargs, subject.options, target)
        declared = declared_sizes(subject, args, kwargs, declared)
        return dataclasses.replace(request, declared=declared)

    def artifact(self, request: Request) -> Artifact:
        """Return the program for one request, from a cache or the compiler.

        Raises
        ------
        NotCompiled
            There is none.
        """
        found = Miss(self._shared, request, self._stages).obtain(PackedWeights())
        return found.executor.artifact

    def artifacts(self, request: Request, *, declared: bool) -> list[Artifact]:
        """Return the program for a call, or those for any sizes that serve calls like it.

        A call has a program of its own if it ran with that, or if there is none for any sizes. Else
        these are the programs of all classes of sizes that were made.

        Parameters
        ----------
        declared
            Whether the caller said which sizes vary. Then it is a program for all of these.

        Raises
        ------
        NotCompiled
            The call does not compile, or no program serves all sizes that are declared.
        """
        if not declared and self._has_own(request):
            return [self.artifact(request)]
        made = self._sizes.made_with(request)
        if declared or not made:
            begins_open = self._shared.subject.options.dynamic is True or request.declared
            general = self._sizes.general(request) if begins_open else None
            if general is not None:
                try:
                    return [self._for_any_sizes(request, general)]
                except NotCompiled:
                    if declared:
                        raise
            elif declared and not made:
                raise NotCompiled(
                    "no further program for many shapes is made: there are enough, or it is for a "
                    "GPU",
                    "Give numbers in place of each Dim.",
                )
        if made:
            return [self.artifact(request.generalized(each)) for each in made]
        return [self.artifact(request)]

    def _for_any_sizes(self, request: Request, general: AnySizes) -> Artifact:
        """Return a program that serves the call and others."""
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
        """Whether such a call ran with a program for its sizes alone."""
        outcomes = self._shared.outcomes.values()
        own = (x for x in outcomes if isinstance(x, Compiled) and not x.facts.shapes)
        return any(outcome.specs == request.specs() for outcome in own)
