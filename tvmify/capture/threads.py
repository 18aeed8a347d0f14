"""Which thread records: PyTorch says of the whole process that it is compiling meanwhile."""

from __future__ import annotations

import contextlib
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
