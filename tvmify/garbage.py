"""No garbage collections while a call waits for its program.

Building makes objects by the million, and few cycles of them that nobody refers to: 15 to 20 MB in
all. Each full collection goes through the objects of torch, SymPy and TVM as well; together they
took a tenth of a first call.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Collector:
    """The collector, of which there is one for all threads, and how many want it to be off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn it off until the last of those who are in here leaves; then as it was."""
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._was_enabled:
                    gc.enable()


uncollected = _Collector().off
