"""No garbage collection while a call waits for its program.

A capture and a build create millions of objects, but few unreachable cycles: 15 to 20 MB in all.
Each full collection also traverses the objects of torch, SymPy and TVM, and all of them together
took a tenth of a first call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

from tvmify.system.forks import short_lock


class _Collector:
    """The process's garbage collector, and which threads want it off."""

    def __init__(self) -> None:
        self._lock = short_lock()
        self._inside: list[int] = []
        self._was_enabled = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn the collector off; the last thread to leave restores its previous state."""
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside.append(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(threading.get_ident())
                if not self._inside and self._was_enabled:
                    gc.enable()

    def forget_others(self) -> None:
        """Forget all threads but this one, in a forked child."""
        own = [thread for thread in self._inside if thread == threading.get_ident()]
        if self._inside and not own and self._was_enabled:
            gc.enable()
        self._inside = own


_collector = _Collector()
uncollected = _collector.off
os.register_at_fork(after_in_child=_collector.forget_others)
