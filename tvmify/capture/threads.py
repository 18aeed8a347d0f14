"""Which thread records: PyTorch says of the whole process that it is compiling meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_recording: int | None = None


@contextlib.contextmanager
def recording_here() -> Iterator[None]:
    """Note that this thread records; one at a time does."""
    global _recording  # noqa: PLW0603
    before, _recording = _recording, threading.get_ident()
    try:
        yield
    finally:
        _recording = before


def is_recorded_elsewhere() -> bool:
    """Whether it is for another thread that ``torch.compiler.is_compiling()`` is true."""
    return _recording is not None and _recording != threading.get_ident()


def is_recorded_here() -> bool:
    """Whether this thread records."""
    return _recording == threading.get_ident()


def _after_fork_in_child() -> None:
    global _recording  # noqa: PLW0603
    if is_recorded_elsewhere():
        _recording = None


os.register_at_fork(after_in_child=_after_fork_in_child)
