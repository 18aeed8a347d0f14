"""Decides whether compiled code is used: it must match eager's results, and not be slower."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tvmify.dispatch.agreement import check_draws, computes_the_same, refuse_unseen_draws
from tvmify.dispatch.outcome import Choice, Compiled, Eager
from tvmify.dispatch.verdict import judge
from tvmify.errors import BuildError, GradientsNeeded
from tvmify.runtime import GraphedCall, timing_algorithms


def check_results(
    compiled: Compiled, leaves: tuple[Any, ...], eager: Callable[[], Any], *, is_tuned: bool
) -> None:
    """Refuse code for a GPU whose results differ from eager's; compare them once per artifact.

    Parameters
    ----------
    leaves
        The leaves of the arguments.
    eager
        Computes the call.
    is_tuned
        Whether cuDNN times its algorithms during the call, as it does once in each process.

    Raises
    ------
    BuildError
        The results differ, or the GPU lacks the memory to compare them.
    """
    run, artifact, gpu = compiled.run, compiled.executor.artifact, compiled.gpu_of(leaves)
    if gpu is None or artifact.writes or run.obstacle(leaves):
        return  # a second run would write again
    with timing_algorithms() if is_tuned else contextlib.nullcontext():
        if not artifact.verdicts:
            _compare(compiled, leaves, eager, gpu)
        elif is_tuned:
            _result(compiled, leaves)


def _compare(
    compiled: Compiled, leaves: tuple[Any, ...], eager: Callable[[], Any], gpu: int
) -> None:
    run = compiled.run
    calls = 3 if isinstance(run, GraphedCall) else 1  # the second is captured, the third replays it
    try:
        repeat = lambda: [_result(compiled, leaves) for _ in range(calls)][-1]  # noqa: E731
        agrees = computes_the_same(repeat, eager, gpu)
    except torch.OutOfMemoryError as error:
        raise BuildError(
            "the GPU lacks the memory to compare compiled code with eager",
            "Free memory, and call refresh().",
        ) from error
    if not agrees:
        raise BuildError(
            "the results of compiled code on the GPU differ from those of eager PyTorch",
            "Please report it, with the module and the shapes of its arguments.",
        )


def check_random(compiled: Compiled, leaves: tuple[Any, ...], eager: Callable[[], Any]) -> None:
    """Refuse code that does not draw the random numbers that eager PyTorch draws.

    Parameters
    ----------
    leaves, eager
        As for `check_results`.

    Raises
    ------
    GradientsNeeded, NotCompiled
        The call draws others, or its backward, which runs forward again, would.
    """
    artifact, captured = compiled.executor.artifact, compiled.facts.captured
    if captured is None or not captured.may_draw:
        return
    if artifact.writes:  # a second run would write again
        refuse_unseen_draws(artifact.draws, artifact.written_names())
    elif not compiled.run.obstacle(leaves):
        gpu = compiled.gpu_of(leaves)
        check_draws(lambda: _result(compiled, leaves), eager, gpu, compiled.differentiable)


def faster(
    compiled: Compiled, leaves: tuple[Any, ...], eager: Callable[[], Any]
) -> Compiled | Eager:
    """Choose the faster of compiled code and eager PyTorch.

    A new verdict is added to those of the artifact.

    Parameters
    ----------
    leaves, eager
        As for `check_results`.

    Returns
    -------
    Compiled or Eager
        The given outcome with the verdict, or eager.

    Raises
    ------
    EagerRaises
        Eager PyTorch raises an error, which the call shall raise as well.
    """
    run, artifact = compiled.run, compiled.executor.artifact
    # A second run would write again, and compiled code refuses calls with an obstacle.
    if artifact.writes or run.obstacle(leaves):
        return compiled
    gpu, graphs = compiled.gpu_of(leaves), isinstance(run, GraphedCall)
    repeat = partial(_result, compiled, leaves)
    verdict = judge(artifact.verdicts, repeat, eager, gpu, graphs=graphs)
    facts = dataclasses.replace(compiled.facts, verdict=verdict)
    if verdict is None or verdict.is_for_compiled:
        return dataclasses.replace(compiled, facts=facts)
    return Eager(facts, Choice.FASTER)


def with_followed(
    compiled: Compiled,
    leaves: tuple[Any, ...],
    eager: Callable[[], Any],
    *,
    has_constants: bool,
) -> Compiled:
    """Find out which leaves of the result have gradients, if any may have.

    Parameters
    ----------
    leaves, eager
        As for `check_results`.
    has_constants
        Whether the program holds tensors of closures or globals by value.

    Raises
    ------
    GradientsNeeded
        One of these constants requires a gradient.
    """
    if not (compiled.differentiable or (has_constants and torch.is_grad_enabled())):
        return compiled
    followed = compiled.follow(leaves, eager)
    if followed is not None and any(followed) and not compiled.differentiable:
        raise GradientsNeeded(
            "a tensor of a closure, or a global tensor, requires a gradient",
            "Call under torch.no_grad() or torch.inference_mode(), or decorate the module that "
            "it belongs to.",
        )
    return dataclasses.replace(compiled, followed=followed)


def _result(compiled: Compiled, leaves: tuple[Any, ...]) -> Any:
    """Return the result of a call of compiled code; raise if it failed."""
    result = compiled.run(leaves)
    if result is NotImplemented:
        raise RuntimeError("compiled code failed")
    return result
