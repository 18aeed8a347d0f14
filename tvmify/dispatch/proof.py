"""Tests a new program before it is stored or used: loads it, and runs it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tvmify.dispatch.generality.numbers import NumberCall
from tvmify.dispatch.module_state import ModuleState
from tvmify.dispatch.request import Request
from tvmify.errors import BuildError, described
from tvmify.runtime import Executor, PackedWeights
from tvmify.system.faults import environment_fault
from tvmify.target import Target

#: Checks that a program runs; raises a `BuildError` if it does not.
Prove = Callable[[Executor], None]


def loads(executor: Executor) -> None:
    """Load a program, if it is for the CPU of this machine.

    Raises
    ------
    BuildError
        It cannot be loaded.
    """
    if _is_for_this_cpu(executor):
        try:
            executor.compiled.load()
        except (RuntimeError, TypeError, ValueError) as error:
            raise unusable(error) from error


def runs(
    module: ModuleState,
    store: PackedWeights,
    request: Request,
    eager: Callable[[], Any],
    executor: Executor,
) -> None:
    """Load a program, pack its weights and run it once, if it is for the CPU of this machine.

    A program with side effects is not run.

    Parameters
    ----------
    module
        The module whose tensors it reads.
    store
        Keeps the packed weights.
    request
        The call.
    eager
        Computes the call. If it raises as well, the program is not at fault.

    Raises
    ------
    BuildError
        It does not load, or fails.
    """
    loads(executor)
    if not _is_for_this_cpu(executor):
        return
    artifact = executor.artifact
    try:
        executor.bind(module.tensors(artifact.weights), store, module.tensors(artifact.state))
    except (RuntimeError, TypeError, ValueError) as error:
        raise unusable(error) from error
    leaves = request.leaves
    call = NumberCall.of(executor.call(), request)
    if artifact.writes or call.obstacle(leaves):
        return
    # Operators of PyTorch in the program may draw random numbers.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            call(leaves)
        except Exception as error:  # of any kind: eager may raise it, too
            if not _raises(eager):
                raise unusable(error) from error


def unusable(error: Exception) -> BuildError:
    """Return the reason for an error of a program that was just built."""
    return environment_fault(error, "loading compiled code") or BuildError(
        f"the compiled program cannot be run: {described(error)}",
        "Run `tvmify doctor` to see whether the compiler works here, then call refresh().",
    )


def _raises(eager: Callable[[], Any]) -> bool:
    try:
        eager()
    except Exception:  # of any kind: the forward of a user ran
        return True
    return False


def _is_for_this_cpu(executor: Executor) -> bool:
    return not executor.refusal and Target.parse(executor.artifact.target).kind != "cuda"
