"""One outcome for the calls of many signatures.

An exact signature describes one call. A general signature leaves something open, for which the
program accepts any value: sizes of tensors (`sizes.py`) or numbers (`numbers.py`). Each kind is a
`Generality`. This module tries them in order, and makes an exact outcome where none applies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from tvmify.dispatch.on_miss import is_awaited
from tvmify.dispatch.outcome import Compiled, Outcome
from tvmify.dispatch.request import General, Request
from tvmify.errors import NotCompiled, TracedElsewhere

SomeGeneral = TypeVar("SomeGeneral", bound="General")


class Generality(Protocol[SomeGeneral]):
    """Something that signatures may leave open, and what was learnt from earlier calls."""

    def alias(self, request: Request) -> Hashable | None:
        """Return the signature that memory has as an alias of a general one.

        None if the dispatcher looks up the general one itself.
        """

    def serves_any(self) -> bool:
        """Whether a general program was accepted so far."""
        ...

    def served(self, request: Request) -> Hashable | None:
        """Return the general signature of an existing outcome that serves a call, or None."""

    def general(self, request: Request) -> SomeGeneral | None:
        """Leave as much of a call open as possible; None if nothing can be."""

    def narrower(
        self, request: Request, general: SomeGeneral, reason: NotCompiled
    ) -> SomeGeneral | None:
        """Leave less open, after ``general`` failed to compile; None if that cannot help."""

    def accept(self, general: SomeGeneral, outcome: Outcome) -> None:
        """Learn which calls a program serves."""

    def refuse(self, request: Request, general: SomeGeneral, reason: NotCompiled) -> None:
        """Learn that the call compiles, but not in general, and why not."""

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn the outcome of an exact request."""

    def forget(self) -> None:
        """Forget everything, since the module may have changed."""


class Kept(NamedTuple):
    """An outcome, and how later calls find it.

    Attributes
    ----------
    found_by
        The signature that it is stored under.
    outcome
        The outcome.
    alias
        Another signature that leads to it, or None: the exact signature of a call that a general
        one serves.
    is_served
        Whether the outcome existed before.
    """

    found_by: Hashable
    outcome: Outcome
    alias: Hashable | None = None
    is_served: bool = False


class Generalizing:
    """Makes outcomes that are as general as possible.

    Parameters
    ----------
    kinds
        What may be left open, in the order in which it is tried.
    """

    def __init__(self, kinds: Sequence[Generality[Any]]) -> None:
        self._kinds = kinds

    def serves_any(self) -> bool:
        """Whether any general program was accepted so far."""
        return any(kind.serves_any() for kind in self._kinds)

    def served(self, request: Request, known: Callable[[Hashable], Outcome | None]) -> Kept | None:
        """Return an existing outcome that serves a call, or None.

        Parameters
        ----------
        known
            Returns the outcome that is stored under a signature, or None.
        """
        for kind in self._kinds:
            signature = kind.served(request)
            outcome = None if signature is None else known(signature)
            if outcome is not None:
                return Kept(signature, outcome, kind.alias(request), is_served=True)
        return None

    def forget(self) -> None:
        """Forget everything that was learnt."""
        for kind in self._kinds:
            kind.forget()

    def make(self, request: Request, make: Callable[[Request], Outcome]) -> Kept:
        """Make an outcome for a call, and for as many others as possible.

        Parameters
        ----------
        make
            Makes the outcome of a general or exact request.
        """
        refused: list[_Refused] = []
        for kind in self._kinds:
            general = kind.general(request)
            while general is not None:
                outcome = make(request.generalized(general))
                if outcome.reason is None:
                    kind.accept(general, outcome)
                    self._refuse(request, refused)
                    return Kept(general.signature, outcome, kind.alias(request))
                if is_awaited(outcome.reason) or isinstance(outcome.reason, TracedElsewhere):
                    # only after the build is it known whether it serves all such calls
                    return Kept(request.exact, outcome)
                last, general = general, kind.narrower(request, general, outcome.reason)
                if general is None:
                    refused.append(_Refused(kind, last, outcome.reason))
        outcome = make(request)
        for kind in self._kinds:
            kind.note(request, outcome)
        if outcome.reason is None:  # otherwise it failed for another reason
            self._refuse(request, refused)
            for _, general, reason in refused:
                if general.varying.axes and isinstance(outcome, Compiled):
                    facts = dataclasses.replace(outcome.facts, one_shape=reason)
                    outcome = dataclasses.replace(outcome, facts=facts)
        return Kept(request.exact, outcome)

    @staticmethod
    def _refuse(request: Request, refused: Sequence[_Refused]) -> None:
        for kind, general, reason in refused:
            kind.refuse(request, general, reason)


class _Refused(NamedTuple):
    """A general request that failed, and why."""

    kind: Generality[Any]
    general: General
    reason: NotCompiled
