"""Locks between processes. They save work; correctness never depends on them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

#: Seconds between two attempts to take a lock that another process holds.
_POLL = 0.05

_held = threading.local()


@contextlib.contextmanager
def locked(path: Path, timeout: float) -> Iterator[bool]:
    """Hold a lock on a file, which is created if needed and never removed.

    The lock is the kernel's (``flock``), which releases it however the process ends. It is
    reentrant.

    Parameters
    ----------
    timeout
        The most seconds to wait.

    Yields
    ------
    bool
        False if the wait timed out, or the file system has no locks.
    """
    # Imported here: it takes as long as a whole warm start, which locks nothing.
    from filelock import FileLock, Timeout

    holder = os.getpid(), path
    own: set[tuple[int, Path]] = vars(_held).setdefault("locks", set())
    if holder in own:
        yield True
        return
    # Never fall back to a lock file whose existence is the lock: it would outlive its process.
    lock = FileLock(path, timeout, 0o600, False, poll_interval=_POLL, fallback_to_soft=False)
    try:
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    own.add(holder)
    try:
        yield True
    finally:
        own.discard(holder)
        with contextlib.suppress(OSError):  # the disk failed; the lock is released at exit
            lock.release()
