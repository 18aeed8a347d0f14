"""Handles memory misses: finds or makes an outcome, and stores it in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from tvmify.dispatch import recording, undescribed
from tvmify.dispatch.attempt import Attempt
from tvmify.dispatch.dispatcher_state import DispatcherState
from tvmify.dispatch.generality.declared import Declared, declared_sizes
from tvmify.dispatch.generality.generalizing import Generalizing, Kept
from tvmify.dispatch.memory import Place
from tvmify.dispatch.outcome import Choice, Compiled, Eager, Facts, Outcome, Partitioned
from tvmify.dispatch.partition import by_parts
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.reasons import without_frames
from tvmify.dispatch.reporting import Reports
from tvmify.dispatch.request import Request
from tvmify.errors import NotCompiled
from tvmify.runtime import LatestCall, check_modes
from tvmify.signature import Args, Kwargs
from tvmify.system import variables

#: Why calls with new signatures run in eager PyTorch.
_TOO_MANY = NotCompiled(
    "it was called with more signatures than cache_size",
    "Raise cache_size, unless there are many more: each of them is compiled.",
)


class Misses:
    """Makes outcomes, and stores them in memory.

    Parameters
    ----------
    state
        The state of the dispatcher.
    general
        Decides which signatures an outcome serves.
    latest
        Reset whenever an outcome may have been evicted.
    reports
        Notified of evictions.
    """

    def __init__(
        self, state: DispatcherState, general: Generalizing, latest: LatestCall, reports: Reports
    ) -> None:
        self._state = state
        self._subject, self._memory = state.subject, state.memory
        self._general = general
        self._latest = latest
        self._reports = reports

    def outcome(
        self,
        signature: Hashable,
        args: Args,
        kwargs: Kwargs,
        stages: Stages,
        declared: Declared | None = None,
    ) -> Outcome:
        """Return the outcome of a call. The caller holds the lock of the dispatcher.

        Parameters
        ----------
        signature
            The signature that memory does not have.
        args, kwargs
            The arguments of the call.
        stages
            Notified of each stage.
        declared
            What the caller declares about the sizes of this call.

        Raises
        ------
        OptionError
            The option ``dynamic_shapes`` does not fit the call.
        """
        subject, memory = self._subject, self._memory
        if not subject.is_part:  # a part is never called by itself
            recording.record(subject, args, kwargs)
        is_full = memory.is_full(subject.options, is_part=subject.is_part)
        if is_full and not self._general.serves_any():
            return Eager.because(_TOO_MANY, "others")
        place = self._state.module.current.number, signature
        kept = self._without_program(signature, args, kwargs, declared or {})
        if isinstance(kept, Request):
            if is_full:
                return Eager.because(_TOO_MANY, "others")
            make = lambda request: Attempt(self._state, request, stages).outcome()  # noqa: E731
            kept = self._general.make(kept, make)
        self._keep(place, kept)
        stages.end()
        self._state.counts.seconds.update(stages.seconds)  # a Counter, which adds
        return kept.outcome

    def _without_program(
        self, signature: Hashable, args: Args, kwargs: Kwargs, declared: Declared
    ) -> Kept | Request:
        """Return an outcome that needs no new program, or else the request for one."""
        if variables.disabled():
            return Kept(signature, Eager(Facts(), Choice.DISABLED))
        try:
            request = Request.of(args, kwargs, self._subject.options, unusual=signature)
        except NotCompiled as reason:
            return Kept(signature, self._without_signature(reason, args, kwargs))
        declared = declared_sizes(self._subject, args, kwargs, declared)
        request = dataclasses.replace(request, declared=declared)
        number = self._state.module.current.number
        known = lambda general: self._memory.known((number, general))  # noqa: E731
        return self._general.served(request, known) or request

    def _without_signature(
        self, reason: NotCompiled, args: Args, kwargs: Kwargs
    ) -> Partitioned | Eager:
        """Return the outcome of a call whose arguments have no signature."""
        facts, watched = Facts(undescribed.TITLE), self._state.module.watched
        assert watched is not None
        try:
            differentiable = check_modes(watched, args, kwargs)
        except NotCompiled as mode:
            return Eager(facts, without_frames(mode))
        return by_parts(self._state, facts, reason, (args, kwargs), None, differentiable)

    def _keep(self, place: Place, kept: Kept) -> None:
        number = self._state.module.current.number  # it changed, if constants were written
        if kept.is_served and kept.alias is not None and isinstance(kept.outcome, Compiled):
            kept.outcome.served += 1
        self._memory.keep(place, (number, kept.found_by), kept.outcome)
        if kept.alias is not None:
            self._memory.alias((number, kept.alias), (number, kept.found_by))
        self._latest.forget()
        self._reports.evictions(self._memory.evictions)
