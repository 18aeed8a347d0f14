"""One outcome for several signatures: it is made once, and each of them finds it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from tvmify import tvmify as decorate
from tvmify.artifact import Artifact
from tvmify.capture import STATIC, Varying
from tvmify.decorate.decorated import dispatcher_of
from tvmify.dispatch.generality.generalizing import Generalizing, Kept
from tvmify.dispatch.outcome import Choice, Compiled, Eager, Facts, Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.errors import CaptureError, NotCompiled, NumberNeeded, TracedElsewhere
from tvmify.options import CompileOptions
from tvmify.runtime import flatten

X = torch.linspace(-1, 1, 12).reshape(3, 4)
COMPILES = Eager(Facts(), Choice.FASTER)


@dataclass(frozen=True)
class AnyLabel:
    """The arguments of a call, with one label that stands for any other."""

    signature: Hashable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    varying: Varying = STATIC

    def adapted(
        self,
        run: Run,
        artifact: Artifact,
        request: Request,
        eager: Callable[[], Any],
        written: Sequence[torch.Tensor],
    ) -> Run:
        return run


class Labels:
    """The argument ``label`` is left open."""

    def __init__(self, *, keeps_exact: bool = True) -> None:
        self._keeps_exact = keeps_exact
        self.accepted: set[Hashable] = set()
        self.refused: list[AnyLabel] = []
        self.narrowed: list[NotCompiled] = []

    def alias(self, request: Request) -> Hashable | None:
        return request.exact if self._keeps_exact else None

    def serves_any(self) -> bool:
        return bool(self.accepted)

    def served(self, request: Request) -> Hashable | None:
        general = self.general(request)
        return general.signature if general and general.signature in self.accepted else None

    def general(self, request: Request) -> AnyLabel | None:
        args, kwargs = request.call
        if "label" not in kwargs:
            return None
        kwargs = kwargs | {"label": "any"}
        return AnyLabel(("any label", flatten(args, kwargs)[1]), args, kwargs)

    def narrower(self, request: Request, general: AnyLabel, reason: NotCompiled) -> None:
        self.narrowed.append(reason)

    def accept(self, general: AnyLabel, outcome: Outcome) -> None:
        self.accepted.add(general.signature)

    def refuse(self, request: Request, general: AnyLabel, reason: NotCompiled) -> None:
        self.refused.append(general)

    def note(self, request: Request, outcome: Outcome) -> None:
        pass

    def forget(self) -> None:
        self.accepted.clear()


def request(**kwargs: Any) -> Request:
    return Request.of((X,), kwargs, CompileOptions.of({}))


def test_the_general_outcome_is_kept_under_the_general_signature() -> None:
    labels, asked = Labels(), []

    def make(request: Request) -> Outcome:
        asked.append(request.kwargs["label"])
        return COMPILES

    call = request(label="a")
    kept = Generalizing([labels]).make(call, make)
    (general,) = labels.accepted
    assert (kept, asked) == (Kept(general, COMPILES, alias=call.exact), ["any"])
    kept = Generalizing([Labels(keeps_exact=False)]).make(call, make)
    assert kept == Kept(general, COMPILES, alias=None)


def test_exact_outcome_without_open_positions() -> None:
    kept = Generalizing([Labels()]).make(request(other="a"), lambda _: COMPILES)
    assert kept == Kept(request(other="a").exact, COMPILES)


@pytest.mark.parametrize("exact", [COMPILES, Eager(Facts(), CaptureError("neither", "Nothing."))])
def test_exact_call_is_the_fallback_of_the_general_one(exact: Eager) -> None:
    labels, reason = Labels(), NumberNeeded()

    def make(request: Request) -> Outcome:
        return exact if request.general is None else Eager(Facts(), reason)

    kept = Generalizing([labels]).make(request(label="a"), make)
    assert kept == Kept(request(label="a").exact, exact)
    assert labels.narrowed == [reason]
    assert not labels.accepted
    # If the exact call fails, too, the label may not be the reason.
    assert len(labels.refused) == (exact is COMPILES)


def test_why_sizes_are_fixed_is_added_to_a_new_outcome() -> None:
    class Sizes(Labels):
        def general(self, request: Request) -> AnyLabel | None:
            general = super().general(request)
            return general and replace(general, varying=Varying({0: ("n", None)}))

    reason, nothing = CaptureError("fixed", "Nothing."), cast("Any", None)
    made = Compiled(Facts("a call"), nothing, nothing, nothing, ((X,), {}), served=3)

    def make(request: Request) -> Outcome:
        return made if request.general is None else Eager(Facts(), reason)

    outcome = Generalizing([Sizes()]).make(request(label="a"), make).outcome
    assert isinstance(outcome, Compiled)
    assert (outcome.facts, outcome.served) == (Facts("a call", one_shape=reason), 3)
    assert made.facts == Facts("a call")


def test_transient_failure_decides_nothing() -> None:
    labels, busy = Labels(), Eager(Facts(), TracedElsewhere("busy", "Wait."))
    kept = Generalizing([labels]).make(request(label="a"), lambda _: busy)
    assert kept == Kept(request(label="a").exact, busy)
    assert not labels.accepted
    assert not labels.refused


def test_serving_outcome_is_taken_from_memory() -> None:
    labels = Labels()
    generalizing = Generalizing([labels])
    call = request(label="b")
    assert generalizing.served(call, lambda _: COMPILES) is None
    assert not generalizing.serves_any()
    generalizing.make(request(label="a"), lambda _: COMPILES)
    assert generalizing.serves_any()
    (general,) = labels.accepted
    assert generalizing.served(call, {general: COMPILES}.get) == Kept(
        general, COMPILES, alias=call.exact, is_served=True
    )
    assert generalizing.served(call, lambda _: None) is None  # it had to leave memory
    generalizing.forget()
    assert generalizing.served(call, lambda _: COMPILES) is None


def test_exact_signatures_share_one_program_and_are_remembered(inference: None) -> None:
    fast: Any = decorate(lambda x, label: x * 2, strict=True, cache_size=2)
    dispatcher_of(fast)._general._kinds = [Labels()]
    for label in ("a", "b", "c", "d", "a", "b"):
        assert torch.equal(fast(X, label=label), X * 2)
    info = fast.cache_info()
    assert (info.builds, info.entries, info.evictions) == (1, 1, 0)
    assert (info.misses, info.hits) == (4, 2)  # the first of each label, and what came again
    assert str(fast.explain()).count("runs compiled") == 1
    fast.refresh()
    assert torch.equal(fast(X, label="a"), X * 2)
    assert fast.cache_info().builds == 1


def test_failed_generalization_refuses_the_outermost_first() -> None:
    more, less = Labels(), Labels()
    outcomes = iter([Eager(Facts(), NumberNeeded()), COMPILES])
    Generalizing([more, less]).make(request(label="a"), lambda _: next(outcomes))
    assert (len(more.refused), len(less.refused)) == (1, 0)
    assert less.accepted
    assert not more.accepted
