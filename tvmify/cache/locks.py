"""Locks between processes. They save work; what is right never depends on them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

#: Seconds between two looks at a lock that another process holds.
_POLL = 0.05

_held = threading.local()


@contextlib.contextmanager
def locked(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the lock of a file, which is made and never removed.

    The kernel holds the lock (``flock``), and releases it when the process ends, however it ends.
    A thread that has it already has it again.

    Parameters
    ----------
    timeout
        How many seconds to wait for it at most.

    Yields
    ------
    bool
        False if it was not to be had in that time, or this file system has no locks.
    """
    # Imported here: it takes as long as a warm start, in which nothing is locked.
    from filelock import FileLock, Timeout

    holder = os.getpid(), path
    own: set[tuple[int, Path]] = vars(_held).setdefault("locks", set())
    if holder in own:
        yield True
        return
    # Never a lock that consists in the file's existence: it would outlive its process.
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
        with contextlib.suppress(OSError):  # a disk that fails; the end of the process frees it
            lock.release()
