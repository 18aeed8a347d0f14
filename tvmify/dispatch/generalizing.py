"""One outcome for several signatures: which signature a call is served under, and how it is made.

An exact signature describes one call. A general one leaves something open that the program takes
any value of, as `numbers.py` does with numbers among the arguments. What may be left open is a
`Generality`; this module asks each of them, and makes an exact outcome where none applies.
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
    """One kind of what may be left open, and what was learnt of it."""

    def alias(self, request: Request) -> Hashable | None:
        """Return another signature by which memory finds what serves a call.

        None if the dispatcher asks for the general one at every call, before it looks into memory.
        """

    def serves_any(self) -> bool:
        """Whether anything was accepted so far."""
        ...

    def served(self, request: Request) -> Hashable | None:
        """Return the general signature that serves a call already; None if there is none."""

    def general(self, request: Request) -> SomeGeneral | None:
        """Leave as much of a call open as may be; None if that is nothing."""

    def narrower(
        self, request: Request, general: SomeGeneral, reason: NotCompiled
    ) -> SomeGeneral | None:
        """Leave less open, after ``general`` was not compiled; None if that cannot help."""

    def accept(self, general: SomeGeneral, outcome: Outcome) -> None:
        """Learn that one program serves all such calls, or all that it says."""

    def refuse(self, request: Request, general: SomeGeneral, reason: NotCompiled) -> None:
        """Learn that the call compiles otherwise, and why the general one does not."""

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn what became of an exact call."""

    def forget(self) -> None:
        """Forget all that was learnt: the module may be another."""


class Kept(NamedTuple):
    """An outcome, and how later calls find it.

    Attributes
    ----------
    found_by
        The signature that it is kept under.
    outcome
        As said.
    alias
        Another signature that leads to it, if there is one: the exact one of a call that a general
        one serves.
    is_served
        Whether the outcome was there already.
    """

    found_by: Hashable
    outcome: Outcome
    alias: Hashable | None = None
    is_served: bool = False


class Generalizing:
    """Makes outcomes that are as general as can be.

    Parameters
    ----------
    kinds
        What may be left open, the first first.
    """

    def __init__(self, kinds: Sequence[Generality[Any]]) -> None:
        self._kinds = kinds

    def serves_any(self) -> bool:
        """Whether there is a general signature that may serve a call."""
        return any(kind.serves_any() for kind in self._kinds)

    def served(self, request: Request, known: Callable[[Hashable], Outcome | None]) -> Kept | None:
        """Return the outcome that serves a call already; None if there is none.

        Parameters
        ----------
        known
            Returns the outcome that is kept under a signature.
        """
        for kind in self._kinds:
            signature = kind.served(request)
            outcome = None if signature is None else known(signature)
            if outcome is not None:
                return Kept(signature, outcome, kind.alias(request), is_served=True)
        return None

    def forget(self) -> None:
        """Forget what was learnt."""
        for kind in self._kinds:
            kind.forget()

    def make(self, request: Request, make: Callable[[Request], Outcome]) -> Kept:
        """Make an outcome for a call, and for as many others as can be.

        Parameters
        ----------
        make
            Makes the outcome of a request, be it general or exact.
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
                    # whether it serves all such calls is known when it is built
                    return Kept(request.exact, outcome)
                last, general = general, kind.narrower(request, general, outcome.reason)
                if general is None:
                    refused.append(_Refused(kind, last, outcome.reason))
        outcome = make(request)
        for kind in self._kinds:
            kind.note(request, outcome)
        if outcome.reason is None:  # else it was for another reason
            self._refuse(request, refused)
            for _, general, reason in refused:
                if general.varying.axes and isinstance(outcome, Compiled):
                    outcome.facts = dataclasses.replace(outcome.facts, one_shape=reason)
        return Kept(request.exact, outcome)

    @staticmethod
    def _refuse(request: Request, refused: Sequence[_Refused]) -> None:
        for kind, general, reason in refused:
            kind.refuse(request, general, reason)


class _Refused(NamedTuple):
    """What could not be left open, and why."""

    kind: Generality[Any]
    general: General
    reason: NotCompiled
