"""Refuses a forward that does more than compute: it prints, logs, or changes what outlives a call.

A program holds operators alone. Recording would do the rest once, and no later call would.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from tvmify.capture.outliving import LIBRARIES, package_of, places_of
from tvmify.errors import HasEffects


@contextlib.contextmanager
def refusing_effects(callable_: Any, recorded: Any) -> Iterator[None]:
    """Refuse side effects of code while it is recorded, and undo them; use inside `tracing`.

    Parameters
    ----------
    callable_
        The module or function.
    recorded
        The module that stands for it while it is recorded.

    Raises
    ------
    HasEffects
        It prints or logs, has changed a variable, a container or an object that it did not make, or
        may advance an iterator.
    """
    refused: list[HasEffects] = []
    with undoing_changes(callable_, recorded) as changed, _refusing_output(refused):
        yield
    if refused:  # and something has caught the error
        raise refused[0]
    if changed:
        raise HasEffects(f"forward changes {changed[0]!r}, which outlives the call", may_cease=True)


@contextlib.contextmanager
def undoing_changes(callable_: Any, recorded: Any) -> Iterator[list[str]]:
    """Undo what code changes that outlives the call.

    Yields
    ------
    list of str
        Gets the names of what a call in eager would change.
    """
    places = list(places_of(callable_, recorded))
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += (place.name for place in places if place.put_back())


# ------------------------------------------------------------------------------ prints and logs


@contextlib.contextmanager
def _refusing_output(refused: list[HasEffects]) -> Iterator[None]:
    """Refuse what this thread prints and logs; adds the refusals to a list."""
    thread = threading.get_ident()
    own_print, own_handle = builtins.print, logging.Logger.handle

    def refuse(what: str) -> None:
        refused.append(HasEffects(f"forward {what} ({_caller()})"))
        raise refused[-1]

    def printing(*values: Any, **how: Any) -> None:
        if threading.get_ident() == thread and not _is_of_library(sys._getframe(1)):
            refuse("prints")
        own_print(*values, **how)

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_here = threading.get_ident() == thread
        if is_here and package_of(record.name) not in LIBRARIES:
            refuse("logs")
        own_handle(logger, record)

    builtins.print, logging.Logger.handle = printing, handle  # type: ignore[method-assign]
    try:
        yield
    finally:
        builtins.print, logging.Logger.handle = own_print, own_handle  # type: ignore[method-assign]


def _is_of_library(frame: types.FrameType) -> bool:
    return package_of(frame.f_globals.get("__name__")) in LIBRARIES


def _caller() -> str:
    """Return the line of the user's code that prints or logs."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") == "logging":
        frame = frame.f_back
    return "no source known" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
