"""Runs calls by parts that cannot be one program: by regions, or by submodules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tvmify.dispatch.agreement import backward_would_draw
from tvmify.dispatch.dispatcher_state import DispatcherState
from tvmify.dispatch.outcome import Eager, Facts, Partitioned
from tvmify.dispatch.parts import Parts
from tvmify.dispatch.reasons import without_frames
from tvmify.dispatch.regions import Driven
from tvmify.dispatch.submodules import Children
from tvmify.errors import (
    CaptureError,
    Divisible,
    GradientsNeeded,
    NotCompiled,
    TracedElsewhere,
    UnsupportedOperator,
)
from tvmify.runtime import autocast_text
from tvmify.signature import Args, Kwargs


def by_parts(
    state: DispatcherState,
    facts: Facts,
    reason: NotCompiled,
    call: tuple[Args, Kwargs],
    specs: tuple[Args, Kwargs] | None,
    differentiable: bool,
) -> Partitioned | Eager:
    """Return the outcome of calls that are not one program: by parts, or else in eager PyTorch.

    Parameters
    ----------
    state
        The state of the dispatcher. It keeps the parts for later calls.
    reason
        Why they are not one program, which says whether parts may be.
    call
        The arguments of one of them.
    facts, specs, differentiable
        As for `Partitioned`.
    """
    try:
        parts = _parts(state, reason)
        if parts is None:
            return Eager(facts, reason)
        bound = state.module.bind_parts(parts)
        eager = state.subject.call(*call)
        _check(parts, eager, *call, reason=reason, differentiable=differentiable)
    except NotCompiled as other:
        return Eager(facts, without_frames(other))
    return Partitioned(facts, parts, bound, specs, differentiable)


def _parts(state: DispatcherState, reason: NotCompiled) -> Parts | None:
    """Return the parts by which a subject runs; None if no part of it can be compiled.

    Raises
    ------
    TracedElsewhere
        Another thread is tracing.
    """
    if reason.divisible is Divisible.NOT:
        return None
    if autocast_text():  # TorchScript has its own casting rules
        return None
    current = state.module.current
    if reason.divisible is Divisible.THIS_CALL_BY_SUBMODULES:
        if current.children is None:
            current.children = _children(state, reason)
        return current.children
    if current.parts is None:
        current.parts = _new_parts(state, reason)
    return current.parts


def _new_parts(state: DispatcherState, reason: NotCompiled) -> Parts | None:
    if reason.divisible is Divisible.BY_SUBMODULES:
        return _children(state, reason)
    try:
        return Driven(state.subject, reason, state.make_part)
    except TracedElsewhere:
        raise
    except NotCompiled:
        pass  # the first reason says more
    if isinstance(reason, UnsupportedOperator):
        return None  # calls without the effect may be one program
    return _children(state, reason)


def _children(state: DispatcherState, reason: NotCompiled) -> Children | None:
    subject = state.subject
    if subject.options.strict:
        return None  # nothing may run in Python silently
    with contextlib.suppress(CaptureError):
        return Children(
            subject, reason, lambda child: state.module.submodule(child, state.make_part)
        )
    return None


def _check(
    parts: Parts,
    eager: Callable[[], Any],
    args: Args,
    kwargs: Kwargs,
    *,
    reason: NotCompiled,
    differentiable: bool,
) -> None:
    """Refuse a call that would differ by parts from eager PyTorch.

    Raises
    ------
    NotCompiled
        The results differ, or a backward would repeat side effects.
    """
    if differentiable and parts.has_effects:
        raise GradientsNeeded(
            "weights require gradients, and forward may have side effects, which a backward must "
            f"not repeat, and it is not one program: {reason.reason}",
            "Call under torch.no_grad() or torch.inference_mode().",
        )
    if differentiable and parts.is_random:
        raise backward_would_draw()
    parts.check(eager, args, kwargs)
