"""Imports torch's tracing stack, which a warm process never needs."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def import_recorder() -> None:
    """Import torch's compiler, even if the working directory was deleted.

    On import it asks for that directory several times, for the defaults of its settings.
    """
    with _existing_directory():
        importlib.import_module("torch._dynamo")


@contextlib.contextmanager
def _existing_directory() -> Iterator[None]:
    """Leave a deleted working directory for a moment."""
    try:
        Path.cwd()
    except OSError:
        pass
    else:
        yield
        return
    deleted = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(tempfile.gettempdir())
        yield
    finally:
        os.fchdir(deleted)
        os.close(deleted)
