"""No garbage collections while a call waits for its program.

Building makes objects by the million, and few cycles of them that nobody refers to: 15 to 20 MB in
all. Each full collection goes through the objects of torch, SymPy and TVM as well; together they
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
    """The collector, of which there is one for all threads, and which want it to be off."""

    def __init__(self) -> None:
        self._lock = short_lock()
        self._inside: list[int] = []
        self._was_enabled = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn it off until the last of those who are in here leaves; then as it was."""
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
        """Let only this thread be in here, in a forked child."""
        own = [thread for thread in self._inside if thread == threading.get_ident()]
        if self._inside and not own and self._was_enabled:
            gc.enable()
        self._inside = own


_collector = _Collector()
uncollected = _collector.off
os.register_at_fork(after_in_child=_collector.forget_others)
