"""From a PyTorch module or function to one ATen program with a fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tvmify.capture.loading import import_recorder
from tvmify.capture.program import Program
from tvmify.capture.questions import asks_for_identity, check_questions
from tvmify.capture.recorded import RecordedGraph
from tvmify.capture.regions.driver import REGION_SCHEMA, Driver, Part
from tvmify.capture.scripted.program import ScriptedProgram
from tvmify.capture.scripted.scripting import CannotScript, scripting
from tvmify.capture.state import present, resolve
from tvmify.capture.varying import STATIC, Limits, Symbols, TensorSizes, Varying, sizes_of
from tvmify.errors import CaptureError, UnsupportedOperator
from tvmify.system.faults import check_temporary_directory

__all__ = [
    "REGION_SCHEMA",
    "STATIC",
    "Driver",
    "Limits",
    "Part",
    "Program",
    "RecordedGraph",
    "Symbols",
    "TensorSizes",
    "Varying",
    "capture",
    "drive",
    "may_ask_for_identity",
    "present",
    "resolve",
    "sizes_of",
]


def capture(
    callable_: Callable[..., Any] | Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Varying = STATIC,
) -> Program:
    """Turn a module or function into one ATen program.

    Scripts it with ``torch.jit.script`` where possible, which gives a program that does not depend
    on the arguments. Otherwise records it with ``torch.export`` for these arguments.

    Parameters
    ----------
    callable_
        A plain module, a plain function, a ScriptModule or a ScriptFunction. It is not changed, and
        other threads may call it at the same time. A program is returned unchanged.
    args, kwargs
        Arguments of a call. Only shapes, dtypes and Python values count.
    varying
        Sizes that are symbols in a program that has to be recorded for these arguments.

    Raises
    ------
    CaptureError
        Both ways fail, for example because control flow depends on the values of tensors, or
        forward asks what only eager PyTorch can answer.
    UnsupportedOperator
        The program changes its own state, or uses something that cannot be interpreted.
    """
    if isinstance(callable_, Program):
        return callable_
    if _is_autocast_by_torchscript(callable_):
        raise CaptureError(
            "TorchScript code runs under autocast, whose rules in TorchScript differ from eager's",
            "Leave torch.autocast, or convert the module with .to(dtype).",
        )
    if isinstance(callable_, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return ScriptedProgram(callable_)
    scripted = _scripted(callable_, args, kwargs)
    if isinstance(scripted, Program):
        return scripted
    check_temporary_directory()
    import_recorder()
    from tvmify.capture.exported.program import TracedProgram

    return TracedProgram(callable_, args, kwargs, scripted, varying)


def _scripted(
    callable_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program | str:
    """Return the scripted program, or why it cannot be scripted."""
    if isinstance(callable_, RecordedGraph):
        return "torch.compile has recorded it"
    check_questions(callable_, args, kwargs)
    try:
        with scripting(callable_) as scripted:
            program = ScriptedProgram(scripted, callable_)
        return program.refusal(args, kwargs) or program
    except CannotScript as error:
        return str(error)
    except UnsupportedOperator as error:
        if error.sets_attributes and "prim::Enter" not in error.operators:
            raise  # torch.export would refuse the assignment too; `with` makes some of its own
        return error.reason


def may_ask_for_identity(captured: Callable[..., Any] | Program) -> bool:
    """Whether a module or function may ask if two arguments are the same tensor."""
    if isinstance(captured, Program):
        return captured.asks_for_identity
    return asks_for_identity(captured)


def drive(
    callable_: Callable[..., Any],
    number: Callable[[], int],
    call: Callable[..., list[torch.Tensor]],
) -> Driver:
    """Split a module or function into regions and the control flow between them. TorchScript runs
    the control flow of TorchScript code, Python that of all other code.

    Parameters
    ----------
    callable_
        As for `capture`.
    number
        Returns a new number for a region.
    call
        Calls a region: takes its number, tensors, integers and floats, and returns tensors.

    Raises
    ------
    CaptureError
        It cannot be scripted, or no region is worth compiling.
    UnsupportedOperator
        It is a plain module with side effects, which its scripted copy would lose.
    """
    if isinstance(callable_, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return Driver(callable_, None, number, call)
    if isinstance(callable_, torch.nn.Module) and any(
        isinstance(part, torch.jit.ScriptModule) for part in callable_.modules()
    ):
        raise CaptureError(
            "some of its modules are TorchScript, whose numbers do not follow Python's rules",
            "Decorate those modules.",
        )
    try:
        with scripting(callable_) as scripted:
            return Driver(scripted, callable_, number, call)
    except CannotScript as error:
        raise CaptureError(f"it cannot be scripted: {error}", "Change that code.") from error


def _is_autocast_by_torchscript(callable_: Callable[..., Any]) -> bool:
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return False
    parts = callable_.modules() if isinstance(callable_, torch.nn.Module) else [callable_]
    return any(isinstance(p, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for p in parts)
